"""The recipes that come with fledge, by the names of their files, such as `smollm2_cpu`."""

import os
from pathlib import Path

from fledge.core.errors import BadInput, nearest

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")  # installed; in a checkout


def shipped_recipes() -> dict[str, Path]:
    """Every shipped recipe by its name."""
    place = next((place for place in _PLACES if place.is_dir()), None)
    return {} if place is None else {file.stem: file for file in sorted(place.glob("*.yaml"))}


def recipe_file(path: str | os.PathLike[str]) -> Path:
    """A recipe as people name it: a file, or the name of a shipped one."""
    file, name = Path(path).expanduser(), os.fspath(path)
    shipped = shipped_recipes()
    if name in shipped and not file.is_file():
        return shipped[name]
    if name == file.stem and not file.exists():  # neither a directory nor a suffix: a name
        raise BadInput("no such recipe", where=name, fix=nearest(name, list(shipped)))
    return file
