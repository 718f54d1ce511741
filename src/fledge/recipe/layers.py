"""Merges a recipe file and its overrides into one mapping, and reports every error in one line.

Every value is kept with the place where it was written: the file's first, then the overrides'.
So switching a kind can drop keys that only the old kind has, overrides may come in any order, and
an error can name the line or the override that caused it. Does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fledge.core.errors import BadInput
from fledge.core.reading import MAX_BYTES, read_bytes, shown
from fledge.core.settings import Tagged
from fledge.recipe.names import by_section, unknown
from fledge.recipe.yaml_text import parse_yaml


@dataclass(frozen=True)
class Setting:
    """One value and where it was written."""

    value: Any
    where: str


class Part(dict[str, Any]):
    """Some keys of a mapping: written over another one, they leave its other keys as they are. The
    values of a section are settings, or parts again where it holds another section."""


def read_layers(
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    recipe: Tagged,
) -> Part:
    """The settings of a recipe with those of the overrides, which are either strings
    (`section.key=value`) or sections with the keys to change."""
    written, changes = Part(), Part()
    if isinstance(source, Path):
        written = _read_file(source, recipe)
    elif source is not None:
        written = _sections(source, lambda *_: "recipe", recipe)
    if isinstance(overrides, Mapping):
        changes = _sections(overrides, lambda *keys: f"argument '{keys[0]}'", recipe)
    else:
        for text in overrides:
            changes = joined(changes, _override(text, recipe))
    kept: Part = joined(_kept(written, changes, recipe), changes)
    return kept


def _read_file(path: Path, recipe: Tagged) -> Part:
    if path.is_fifo():  # `fledge plan <(make-recipe)`
        with path.open("rb") as pipe:
            text = pipe.read(MAX_BYTES)
    else:
        text = read_bytes(path, what="the recipe")
    data, lines = parse_yaml(text, where=str(path))
    data = {} if data is None else data
    if not isinstance(data, dict):
        fix = "write 'section:' lines with 'key: value' below them"
        raise BadInput(f"a recipe is a mapping, not {shown(data)}", where=str(path), fix=fix)

    def place(*keys: str) -> str:
        return f"{path}, line {lines[keys]}" if keys in lines else str(path)

    return _sections(data, place, recipe)


def _sections(data: Mapping[Any, Any], place: Callable[..., str], recipe: Tagged) -> Part:
    """The settings of a mapping; `place` says where a section, or one of its keys, was written."""
    sections = Part()
    for name, body in data.items():
        keys = {} if body is None else body  # `training:` and nothing below it
        for section, inner in by_section(str(name), keys).items():
            tree = _settings(inner, partial(place, str(name)), recipe.inner(section))
            sections = joined(sections, Part({section: tree}))
    return sections


def _settings(value: Any, place: Callable[..., str], shape: Tagged | None) -> Any:
    """A value with its place; a section becomes a part, whose values have places of their own."""
    value = value if shape is None else shape.spread(value)
    if shape is None or not isinstance(value, Mapping):
        return Setting(value, place())
    return Part(
        (str(key), _settings(inner, partial(place, str(key)), shape.inner(str(key))))
        for key, inner in value.items()
    )


def _override(text: str, recipe: Tagged) -> Part:
    """The settings of an override `section.key=value`."""
    where = f"override '{text}'" if len(text) <= 200 else f"override '{text[:100]}...'"
    name, equals, raw = text.partition("=")
    names = [part.strip() for part in name.split(".")]
    if not equals or not all(names):
        fix = "write section.key=value, for example training.lr=1e-4"
        raise BadInput("not an override", where=where, fix=fix)
    value = reduce(lambda inner, key: Part({key: inner}), reversed(names), _parsed(raw, where))
    return _sections(value, lambda *_: where, recipe)


def _parsed(raw: str, where: str) -> Any:
    if not raw.strip():
        raise BadInput("the value is missing", where=where, fix="write null for none")
    try:
        return parse_yaml(raw, where=where)[0]
    except BadInput as error:
        fix = "put the value in double quotes inside single ones: 'section.key=\"value\"'"
        raise BadInput(error.what, where=where, fix=fix) from error


def joined(old: Any, new: Any) -> Any:
    """`new` written over `old`."""
    if isinstance(old, Setting) and isinstance(new, Setting):
        return Setting(joined(old.value, new.value), new.where)
    if isinstance(new, Part) and isinstance(old, dict):
        return type(old)(old | {key: joined(old.get(key), value) for key, value in new.items()})
    return new


def _kept(old: Part, new: Part, shape: Tagged) -> Part:
    """The settings without those that only the old kind has, where `new` selects another kind."""
    before = shape.kind_of(plain(old))
    after = shape.kind_of(plain(new), before)
    gone: set[str] = set()
    if before != after and before in shape.kinds() and after in shape.kinds():
        gone = shape.fields(before).keys() - shape.fields(after).keys() | {shape.tag}
    kept = Part()
    for key, value in old.items():
        inner, change = shape.inner(key, before), new.get(key)
        if inner is not None and isinstance(value, Part) and isinstance(change, Part):
            value = _kept(value, change, inner)
        if key not in gone:
            kept[key] = value
    return kept


def plain(value: Any) -> Any:
    """The values of settings, ready for validation."""
    if isinstance(value, Setting):
        return plain(value.value)
    return {key: plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value


_MESSAGES = {"missing": "a value is required", "model_type": "must be a mapping"}


def one_line(error: ValidationError, *, settings: Part, where: str, recipe: Tagged) -> BadInput:
    """The first error of pydantic (an unknown name before any other), with its place, the value,
    and how many more there are."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = first["loc"]
    setting: Any = settings
    for key in map(str, place):
        setting = setting.get(key) if isinstance(setting, Part) else setting
    where = setting.where if isinstance(setting, Setting) else where
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).lstrip(".")
    if first["type"] == "extra_forbidden":
        what, fix = unknown([str(key) for key in place], plain(settings), recipe)
        return BadInput(what, where=where, fix=fix)
    message = first["msg"].removeprefix("Value error, ")
    message = _MESSAGES.get(first["type"], f"{message[0].lower()}{message[1:]}")
    if first["type"] != "missing" and not isinstance(first["input"], dict | BaseModel):
        message += f", got {shown(first['input'])}"
    more = error.error_count() - 1
    what = f"{name}: {message}" if name else message
    return BadInput(what + (f" (and {more} more)" if more else ""), where=where)
