"""The line about a section or a key that recipes do not have: what was probably meant. Imports no
torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput, nearest
from fledge.recipe.aliases import ours

if TYPE_CHECKING:
    from fledge.recipe.layers import Shape


def unknown_section(
    name: str, where: str, shapes: Mapping[str, "Shape"], inside: Iterable[str] = ()
) -> BadInput:
    """The fix names the place of a key called so, the nearest section, or else the place of a key
    that stands below it."""
    found = _homes(name, shapes)
    fix = _did_you_mean(found) if found else nearest(name, list(shapes))
    if not fix.startswith("did you mean"):
        below = [home for key in inside for home in _homes(key, shapes)]
        fix = _did_you_mean(below[:1]) if below else fix
    return BadInput(f"unknown section '{name}'", where=where, fix=fix)


def unknown_key(
    section: str, key: str, where: str, *, shapes: Mapping[str, "Shape"], kind: str
) -> BadInput:
    shape = shapes[section]
    owners = [name for name in shape.kinds if key in shape.fields(name)]
    known = shape.fields(kind)
    found = _homes(key, shapes)
    # what the section itself, as it is, would call it leaves no choice
    here = [home for home in found if home.removeprefix(f"{section}.") in known]
    fix = _did_you_mean(here or found) if found else nearest(key, list(known))
    if owners:
        tag = f"{section}.{shape.tag}"
        fix = f"it belongs to {tag}={owners[0]}, but {tag} is {kind}"
    return BadInput(f"unknown key '{section}.{key}'", where=where, fix=fix)


def _homes(key: str, shapes: Mapping[str, "Shape"]) -> list[str]:
    """`section.key` of the sections that have such a key, or of what other trainers call so."""
    own = [f"{section}.{key}" for section in shapes if key in shapes[section].all_keys()]
    return own[:1] or [place for place in ours(key) if place.partition(".")[0] in shapes]


def _did_you_mean(places: Sequence[str]) -> str:
    return "did you mean '" + "' or '".join(places) + "'?"
