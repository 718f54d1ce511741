"""A recipe file and its overrides become one mapping, and every refusal one line.

Everything is flattened to (section, key) with the place it was written in, file first, overrides
after. So a switched kind can drop what only the old kind understood, overrides may come in any
order, and an error can name the line or the override it is about. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from fledge.core.errors import BadInput, nearest
from fledge.core.settings import Tagged
from fledge.recipe.yaml_text import parse_yaml

Key = tuple[str, str]
_SHOWN = 60  # characters of an offending value


@dataclass(frozen=True)
class Entry:
    """One written value and where it was written."""

    value: Any
    where: str
    override: bool = False


@dataclass(frozen=True)
class Shape:
    """What a section may hold: one kind, or several selected by a tag (`backend`, `kind`)."""

    tag: str | None
    kinds: Mapping[str, type[BaseModel]]
    default_kind: str

    def fields(self, kind: str) -> dict[str, Any]:
        return dict(self.kinds[kind].model_fields)

    def all_keys(self) -> set[str]:
        return {key for kind in self.kinds for key in self.fields(kind)}

    def nested(self, key: str) -> Tagged | None:
        """How the kinds of a field are told apart, if it has any (`objective.loss`)."""
        fields = [self.fields(kind)[key] for kind in self.kinds if key in self.fields(kind)]
        return next((tagged for field in fields if (tagged := _tagged(field))), None)


def shapes_of(recipe: type[BaseModel]) -> dict[str, Shape]:
    """The sections of a recipe class, read from its fields."""
    shapes = {}
    for name, field in recipe.model_fields.items():
        tagged = _tagged(field)
        if tagged is None:
            assert isinstance(field.annotation, type)
            shapes[name] = Shape(None, {"": field.annotation}, "")
        else:
            shapes[name] = Shape(tagged.tag, tagged.kinds(), tagged.default)
    return shapes


def _tagged(field: Any) -> Tagged | None:
    return next((item for item in field.metadata if isinstance(item, Tagged)), None)


def layered(
    path: Path | None, overrides: Sequence[str], *, shapes: Mapping[str, Shape]
) -> tuple[dict[str, dict[str, Any]], dict[Key, Entry]]:
    """The merged mapping, ready for validation, and the entries it was made of."""
    written = _file_entries(path, shapes) if path is not None else {}
    changes: dict[Key, Entry] = {}
    for text in overrides:
        _read_override(text, shapes=shapes, changes=changes, below=written)
    kinds, entries = _settled(written, changes, shapes=shapes)
    merged: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for place, entry in entries.items():
        section, key = place
        tagged = _tagged(shapes[section].fields(kinds[section])[key])
        layers = [layer[place] for layer in (written, changes) if place in layer]
        merged[section][key] = entry.value if tagged is None else _nested(place, tagged, layers)
    for name, shape in shapes.items():
        if shape.tag is not None:
            merged[name][shape.tag] = kinds[name]
    return merged, entries


def _settled(
    written: Mapping[Key, Entry], changes: Mapping[Key, Entry], *, shapes: Mapping[str, Shape]
) -> tuple[dict[str, str], dict[Key, Entry]]:
    """The kind of every section, and what is said of it, overrides over the file."""
    kinds = {name: _kind(name, shape, written, changes) for name, shape in shapes.items()}
    gone = _left_behind(written, changes, shapes=shapes, kinds=kinds)
    entries = {place: entry for place, entry in written.items() if place not in gone}
    entries |= changes
    for (section, key), entry in entries.items():
        if key not in shapes[section].fields(kinds[section]):
            raise _unknown_key(section, key, entry.where, shapes=shapes, kind=kinds[section])
    return kinds, entries


def _nested(place: Key, tagged: Tagged, layers: Sequence[Entry]) -> Any:
    """The value of a field that has kinds of its own (`objective.loss`): as a section, of which the
    file says something and overrides say more."""
    name = ".".join(place)
    spoken = [(tagged.spread(layer.value), layer) for layer in layers]
    if not isinstance(spoken[-1][0], dict):
        return spoken[-1][0]  # refused later, with its place
    parts: list[dict[Key, Entry]] = [
        {(name, str(part)): replace(layer, value=inner) for part, inner in value.items()}
        for value, layer in spoken
        if isinstance(value, dict)
    ]
    written, changes = parts if len(parts) == 2 else (parts[0], {})
    shape = Shape(tagged.tag, tagged.kinds(), tagged.default)
    kinds, entries = _settled(written, changes, shapes={name: shape})
    said = {part: entry.value for (_, part), entry in entries.items()}
    return {**said, tagged.tag: kinds[name]}


def one_line(
    error: ValidationError, *, entries: Mapping[Key, Entry], shapes: Mapping[str, Shape], where: str
) -> BadInput:
    """The first complaint of pydantic, with its place, the value, and how many more there are."""
    first, more = error.errors()[0], error.error_count() - 1
    place = [str(part) for part in first["loc"]]
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    entry = entries.get((place[0], place[1])) if len(place) > 1 else None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "a value is required"
    elif not isinstance(first["input"], dict | BaseModel):
        message = f"{message[0].lower()}{message[1:]}, got {_shown(first['input'])}"
    what = f"{name}: {message}" if name else message
    what += f" (and {more} more)" if more else ""
    return BadInput(what, where=entry.where if entry is not None else where)


def _file_entries(path: Path, shapes: Mapping[str, Shape]) -> dict[Key, Entry]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        fix = "check the path of the recipe"
        raise BadInput(error.strerror or str(error), where=str(path), fix=fix) from error
    data, lines = parse_yaml(raw, where=str(path))
    data = {} if data is None else data
    if not isinstance(data, dict):
        fix = "write 'section:' lines with 'key: value' below them"
        raise BadInput(f"a recipe is a mapping, not {_shown(data)}", where=str(path), fix=fix)
    entries: dict[Key, Entry] = {}
    for section, body in data.items():
        where = f"{path}, line {lines[(str(section),)]}" if (str(section),) in lines else str(path)
        if section not in shapes:
            raise _unknown_section(str(section), where, shapes)
        if body is not None and not isinstance(body, dict):
            fix = "write its keys on indented lines below it"
            raise BadInput(f"section '{section}' holds {_shown(body)}", where=where, fix=fix)
        for key, value in (body or {}).items():
            line = lines.get((section, str(key)))
            at = str(path) if line is None else f"{path}, line {line}"
            entries[(section, str(key))] = Entry(value, at)
    return entries


def _read_override(
    text: str, *, shapes: Mapping[str, Shape], changes: dict[Key, Entry], below: Mapping[Key, Entry]
) -> None:
    """Add what `section.key=value` sets to `changes`; a mapping for a section sets its keys."""
    where = f"override '{text}'"
    name, equals, raw = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or not all(parts):
        fix = "write section.key=value, for example training.lr=1e-4"
        raise BadInput("not an override", where=where, fix=fix)
    section, keys = parts[0], parts[1:]
    if section not in shapes:
        raise _unknown_section(section, where, shapes)
    value = _override_value(raw, where=where)
    if not keys:
        if not isinstance(value, dict):
            fix = f"write {section}.key=value"
            raise BadInput(f"'{section}' is a section, not a value", where=where, fix=fix)
        changes |= {(section, str(key)): Entry(v, where, True) for key, v in value.items()}
        return
    place = (section, keys[0])
    tagged = shapes[section].nested(keys[0])
    if tagged is not None:  # loss=lk_lambda and loss.scale=0.5 in any order
        value = _with({}, keys[1:], value) if keys[1:] else tagged.spread(value)
        earlier = changes.get(place)
        if earlier is not None and isinstance(earlier.value, dict) and isinstance(value, dict):
            value, where = {**earlier.value, **value}, f"{earlier.where} and {where}"
        changes[place] = Entry(value, where, True)
    elif len(keys) == 1:
        changes[place] = Entry(value, where, True)
    elif _holds_mapping(shapes[section], keys[0]):
        old = changes.get(place) or below.get(place)
        base = old.value if old is not None and isinstance(old.value, dict) else {}
        changes[place] = Entry(_with(base, keys[1:], value), where, True)
    elif keys[0] not in shapes[section].all_keys():
        kind = shapes[section].default_kind
        raise _unknown_key(section, keys[0], where, shapes=shapes, kind=kind)
    else:
        fix = f"write {section}.{keys[0]}=value"
        raise BadInput(f"'{section}.{keys[0]}' has no parts", where=where, fix=fix)


def _override_value(raw: str, *, where: str) -> Any:
    if not raw.strip():
        raise BadInput("the value is missing", where=where, fix="write null for none")
    try:
        return parse_yaml(raw, where=where)[0]
    except BadInput as error:
        fix = "put the value in double quotes inside single ones: 'section.key=\"value\"'"
        raise BadInput(error.what, where=where, fix=fix) from error


def _with(base: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with one value set."""
    if len(keys) == 1:
        return {**base, keys[0]: value}
    inner = base.get(keys[0])
    return {**base, keys[0]: _with(inner if isinstance(inner, dict) else {}, keys[1:], value)}


def _holds_mapping(shape: Shape, key: str) -> bool:
    fields = (shape.fields(kind).get(key) for kind in shape.kinds)
    return any(field is not None and get_origin(field.annotation) is dict for field in fields)


def _kind(
    name: str, shape: Shape, entries: Mapping[Key, Entry], changes: Mapping[Key, Entry]
) -> str:
    entry = _named_kind(name, shape, changes) or _named_kind(name, shape, entries)
    if entry is None:
        return shape.default_kind
    if not isinstance(entry.value, str) or entry.value not in shape.kinds:
        what = f"{name}.{shape.tag}: unknown {shape.tag} {_shown(entry.value)}"
        fix = nearest(str(entry.value), sorted(shape.kinds))
        raise BadInput(what, where=entry.where, fix=fix)
    return entry.value


def _named_kind(name: str, shape: Shape, layer: Mapping[Key, Entry]) -> Entry | None:
    """The kind that a file, or the overrides, ask for: by the tag, else by a key that one kind
    alone has and cannot do without (`target.cached_target_path` is of no use to another)."""
    if shape.tag is None or (name, shape.tag) in layer:
        return layer.get((name, shape.tag or ""))
    for kind, model in shape.kinds.items():
        for key, field in model.model_fields.items():
            written = layer.get((name, key))
            if field.is_required() and written is not None and written.value is not None:
                return Entry(kind, written.where, written.override)
    return None


def _left_behind(
    entries: Mapping[Key, Entry],
    changes: Mapping[Key, Entry],
    *,
    shapes: Mapping[str, Shape],
    kinds: Mapping[str, str],
) -> list[Key]:
    """Keys of the file that the kind chosen by an override does not know, but the old one does."""
    gone = []
    for section, key in entries:
        shape = shapes[section]
        if _named_kind(section, shape, changes) is None:
            continue
        old = _kind(section, shape, entries, {})
        if key in shape.fields(old) and key not in shape.fields(kinds[section]):
            gone.append((section, key))
    return gone


def _unknown_section(name: str, where: str, shapes: Mapping[str, Shape]) -> BadInput:
    homes = [f"{section}.{name}" for section, shape in shapes.items() if name in shape.all_keys()]
    if homes:
        fix = f"did you mean '{homes[0]}'?"
    else:
        fix = nearest(name, list(shapes))
    return BadInput(f"unknown section '{name}'", where=where, fix=fix)


def _unknown_key(
    section: str, key: str, where: str, *, shapes: Mapping[str, Shape], kind: str
) -> BadInput:
    shape = shapes[section]
    owners = [name for name in shape.kinds if key in shape.fields(name)]
    homes = [f"{name}.{key}" for name, other in shapes.items() if key in other.all_keys()]
    if owners:
        fix = (
            f"it belongs to {section}.{shape.tag}={owners[0]}, but {section}.{shape.tag} is {kind}"
        )
    else:
        fix = f"did you mean '{homes[0]}'?" if homes else nearest(key, list(shape.fields(kind)))
    return BadInput(f"unknown key '{section}.{key}'", where=where, fix=fix)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
