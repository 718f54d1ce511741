"""The recipes that come with fledge, by name: they are part of the package, so that an install from
an index has them, too (in a checkout, `recipes/` is a link to them). Does not import torch."""

import os
from pathlib import Path

from fledge.core.errors import BadInput, nearest

_HOME = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The files of all shipped recipes, by name, in alphabetical order."""
    return {path.stem: path for path in sorted(_HOME.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe."""
    shipped = shipped_recipes()
    if name not in shipped:
        fix = f"{nearest(name, list(shipped))} (`fledge recipe list`)"
        raise BadInput(f"no recipe of that name comes with fledge: '{name}'", fix=fix)
    return shipped[name]


def recipe_file(path: str | os.PathLike[str]) -> Path:
    """The file of a recipe that a user names: a path, or else the name of a shipped recipe. A
    directory of that name (a run, for example) does not hide it."""
    file = Path(path).expanduser()
    if file.exists() and not file.is_dir():
        return file
    name = os.fspath(path)
    if name in shipped_recipes():
        return shipped_recipe(name)
    if not file.exists():
        bare = name == file.stem  # without directory and suffix: meant as a name
        if bare or file.stem in shipped_recipes():
            fix = nearest(file.stem, list(shipped_recipes()))
            fix = f"by name, shipped recipes need no file: {file.stem}" if not bare else fix
            raise BadInput("no such recipe", where=name, fix=fix)
    return file


def title(path: Path) -> str:
    """The purpose of a shipped recipe, which is its first line."""
    return path.read_text().partition("\n")[0].removeprefix("# ").rstrip(".")
