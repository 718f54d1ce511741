"""The recipes that come with fledge, by the names of their files, such as `smollm2_cpu`."""

import os
from pathlib import Path

from fledge.core.errors import BadInput, nearest

_PACKAGE = Path(__file__).parents[1]
# inside an installed package; in a checkout
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")


def shipped_recipes() -> dict[str, Path]:
    """Every shipped recipe by its name."""
    place = next((place for place in _PLACES if place.is_dir()), None)
    files = [] if place is None else sorted(place.glob("*.yaml"))
    return {"demo": _PACKAGE / "demo" / "recipe.yaml"} | {file.stem: file for file in files}


def shipped_recipe(name: str | os.PathLike[str]) -> Path | None:
    """The file of a shipped recipe. What looks like a path, or is a file, is none."""
    text = os.fspath(name)
    if Path(text).exists() or Path(text).name != text or Path(text).suffix:
        return None
    found = shipped_recipes()
    if text not in found:
        what = f"no recipe '{text}', neither a file nor one that comes with fledge"
        raise BadInput(what, fix=nearest(text, [*found]))
    return found[text]
