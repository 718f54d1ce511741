"""Errors about unknown sections and keys, with what was probably meant. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput, nearest
from fledge.recipe.aliases import ours

if TYPE_CHECKING:
    from fledge.recipe.layers import Shape


def unknown_section(
    name: str, where: str, shapes: Mapping[str, "Shape"], inside: Iterable[str] = ()
) -> BadInput:
    """The error about an unknown section. Its fix names the place of a key with that name, else the
    nearest section, else the place of a key inside it."""
    places = _places_of(name, shapes)
    fix = _did_you_mean(places) if places else nearest(name, list(shapes))
    if not fix.startswith("did you mean"):
        inner_places = [place for key in inside for place in _places_of(key, shapes)]
        fix = _did_you_mean(inner_places[:1]) if inner_places else fix
    return BadInput(f"unknown section '{name}'", where=where, fix=fix)


def unknown_key(
    section: str, key: str, where: str, *, shapes: Mapping[str, "Shape"], kind: str
) -> BadInput:
    shape = shapes[section]
    owners = [name for name in shape.kinds if key in shape.fields(name)]
    fields = shape.fields(kind)
    places = _places_of(key, shapes)
    # a match in the section itself, with its current kind, is preferred
    in_section = [place for place in places if place.removeprefix(f"{section}.") in fields]
    fix = _did_you_mean(in_section or places) if places else nearest(key, list(fields))
    if owners:
        tag = f"{section}.{shape.tag}"
        fix = f"it belongs to {tag}={owners[0]}, but {tag} is {kind}"
    return BadInput(f"unknown key '{section}.{key}'", where=where, fix=fix)


def _places_of(key: str, shapes: Mapping[str, "Shape"]) -> list[str]:
    """`section.key` of a section that has such a key, or of the keys that others call so."""
    matches = [f"{section}.{key}" for section in shapes if key in shapes[section].all_keys()]
    return matches[:1] or [place for place in ours(key) if place.partition(".")[0] in shapes]


def _did_you_mean(places: Sequence[str]) -> str:
    return "did you mean '" + "' or '".join(places) + "'?"
