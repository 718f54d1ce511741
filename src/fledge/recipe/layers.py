"""Merges a recipe file and its overrides into one mapping, and reports every error in one line.

Every value is stored by section and key with the place where it was written, the file first, then
the overrides. So switching a kind can drop keys that only the old kind has, overrides may come in
any order, and an error can name the line or the override that caused it. Does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from fledge.core.errors import BadInput, nearest
from fledge.core.reading import MAX_BYTES, read_bytes, shown
from fledge.core.settings import Tagged
from fledge.recipe.names import our_section, unknown_key, unknown_section
from fledge.recipe.yaml_text import parse_yaml


@dataclass(frozen=True)
class Setting:
    """One value and where it was written."""

    value: Any
    where: str


Layer = dict[str, dict[str, Setting]]  # settings of a file or of the overrides, by section and key
DRAFTS = "drafts"  # in a recipe of several drafts: the settings of each, by name


@dataclass(frozen=True)
class Shape:
    """What a section may contain: one kind, or several selected by a tag (`backend`, `kind`)."""

    tag: str | None
    kinds: Mapping[str, type[BaseModel]]
    default_kind: str

    def fields(self, kind: str) -> dict[str, Any]:
        return dict(self.kinds[kind].model_fields)

    def all_keys(self) -> set[str]:
        return {key for kind in self.kinds for key in self.fields(kind)}

    def fields_named(self, key: str) -> list[Any]:
        """The fields of that name, one per kind that has it."""
        return [self.fields(kind)[key] for kind in self.kinds if key in self.fields(kind)]

    def nested(self, key: str) -> Tagged | None:
        """The tag that selects the kind of a field, if it has several (`objective.loss`)."""
        return next(
            (tagged for field in self.fields_named(key) if (tagged := _tagged(field))), None
        )


def shapes_of(recipe: type[BaseModel]) -> dict[str, Shape]:
    """The sections of a recipe class, read from its fields."""
    return {name: _shape_of(field) for name, field in recipe.model_fields.items()}


def _shape_of(field: Any) -> Shape:
    tagged = _tagged(field)
    if tagged is not None:
        return Shape(tagged.tag, tagged.kinds(), tagged.default)
    assert isinstance(field.annotation, type)
    return Shape(None, {"": field.annotation}, "")


def _tagged(field: Any) -> Tagged | None:
    return next((item for item in field.metadata if isinstance(item, Tagged)), None)


class Written:
    """The settings of a file, or of the overrides: for all drafts, and for each one by name."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self.sections: Layer = {name: {} for name in shapes}
        self.drafts: dict[str, Layer] = {}

    def of(self, draft: str) -> Layer:
        """The settings for one draft alone."""
        return self.drafts.get(draft) or {name: {} for name in self._shapes}

    def _begin(self, draft: str) -> Layer:
        return self.drafts.setdefault(draft, self.of(draft))

    def read_file(self, path: Path) -> None:
        data, lines = parse_yaml(_recipe_text(path), where=str(path))
        data = {} if data is None else data
        if not isinstance(data, dict):
            fix = "write 'section:' lines with 'key: value' below them"
            raise BadInput(f"a recipe is a mapping, not {shown(data)}", where=str(path), fix=fix)

        def place(*keys: str) -> str:
            return f"{path}, line {lines[keys]}" if keys in lines else str(path)

        self.read(data, place)

    def read(self, data: Mapping[str, Any], place: Callable[..., str]) -> None:
        """Add the settings of a mapping: its sections, and those of its `drafts`. `place` says
        where a section, or one of its keys, was written."""
        sections = {name: body for name, body in data.items() if name != DRAFTS}
        self._read_sections(sections, place, self.sections)
        drafts = data.get(DRAFTS, {})
        if not isinstance(drafts, Mapping) or (DRAFTS in data and not drafts):
            fix = "write a name for each, and its sections below"
            raise BadInput(f"'{DRAFTS}' holds {shown(drafts)}", where=place(DRAFTS), fix=fix)
        for name, body in drafts.items():
            here = partial(place, DRAFTS, str(name))
            if body is not None and not isinstance(body, Mapping):
                fix = "write its sections on indented lines below it"
                raise BadInput(f"draft '{name}' holds {shown(body)}", where=here(), fix=fix)
            self._read_sections(body or {}, here, self._begin(str(name)))

    def _read_sections(
        self, data: Mapping[str, Any], place: Callable[..., str], into: Layer
    ) -> None:
        for section, body in data.items():
            where = place(str(section))
            keys = [str(key) for key in body] if isinstance(body, Mapping) else []
            unknown = [key for key in keys if our_section(section, key) not in self._shapes]
            if section not in self._shapes and (unknown or not keys):
                raise unknown_section(str(section), where, self._shapes, unknown)
            if body is not None and not isinstance(body, Mapping):
                fix = "write its keys on indented lines below it"
                raise BadInput(f"section '{section}' holds {shown(body)}", where=where, fix=fix)
            for key, value in zip(keys, (body or {}).values(), strict=True):
                setting = Setting(value, place(section, key))
                into[our_section(section, key)][key] = setting

    def override(self, text: str, below: "Written") -> None:
        """Add an override `section.key=value`, or `drafts.name.section.key=value`, of the recipe
        `below`."""
        where = f"override '{text}'" if len(text) <= 200 else f"override '{text[:100]}...'"
        name, equals, raw = text.partition("=")
        parts = [part.strip() for part in name.split(".")]
        if not equals or not all(parts):
            fix = "write section.key=value, for example training.lr=1e-4"
            raise BadInput("not an override", where=where, fix=fix)
        if parts[0] != DRAFTS:
            self._set(parts, raw, where, self.sections, below.sections)
            return
        draft = parts[1] if len(parts) > 1 else ""
        if draft not in below.drafts or len(parts) == 2:
            names = ", ".join(below.drafts) or "none"
            fix = f"write {DRAFTS}.name.section.key=value; the drafts of this recipe: {names}"
            raise BadInput("not a key of a draft", where=where, fix=fix)
        self._set(parts[2:], raw, where, self._begin(draft), below.of(draft))

    def _set(self, parts: Sequence[str], raw: str, where: str, into: Layer, below: Layer) -> None:
        """Set one value; a mapping given for a section sets its keys. `parts`: section, key, and
        keys inside its value."""
        keys = parts[1:]
        section = our_section(parts[0], keys[0]) if keys else parts[0]
        if section not in self._shapes:
            raise unknown_section(section, where, self._shapes, keys)
        shape, value, settings = self._shapes[section], _override_value(raw, where), into[section]
        if not keys:
            if not isinstance(value, dict):
                fix = f"write {section}.key=value"
                raise BadInput(f"'{section}' is a section, not a value", where=where, fix=fix)
            settings |= {str(key): Setting(inner, where) for key, inner in value.items()}
            return
        key, inside = keys[0], keys[1:]
        earlier = settings.get(key)
        if (tagged := shape.nested(key)) is not None:  # loss=lk_lambda, loss.scale=0.5: any order
            value = _with_value({}, inside, value) if inside else tagged.spread(value)
            if earlier is not None and isinstance(earlier.value, dict) and isinstance(value, dict):
                value, where = {**earlier.value, **value}, f"{earlier.where} and {where}"
        elif inside:
            if key not in shape.all_keys():
                raise unknown_key(section, key, where, shapes=self._shapes, kind=shape.default_kind)
            if not any(_has_parts(field.annotation) for field in shape.fields_named(key)):
                fix = f"write {section}.{key}=value"
                raise BadInput(f"'{section}.{key}' has no parts", where=where, fix=fix)
            old = earlier or below[section].get(key)
            base = old.value if old is not None and isinstance(old.value, dict) else {}
            value = _with_value(base, inside, value)
        settings[key] = Setting(value, where)


def read_layers(
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    shapes: Mapping[str, Shape],
) -> tuple[Written, Written]:
    """The settings of the recipe, and those of the overrides, which are either strings
    (`section.key=value`) or sections with the keys to change."""
    written, changes = Written(shapes), Written(shapes)
    if isinstance(source, Path):
        written.read_file(source)
    elif source is not None:
        written.read(source, lambda *_: "recipe")
    if isinstance(overrides, Mapping):
        changes.read(overrides, lambda *keys: f"argument '{keys[0]}'")
    else:
        for text in overrides:
            changes.override(text, written)
    return written, changes


def layered(
    layers: Sequence[Layer], *, shapes: Mapping[str, Shape]
) -> tuple[dict[str, dict[str, Any]], Layer]:
    """The merged mapping, ready for validation, and the entries it was built from; each layer takes
    precedence over those before it."""
    merged: dict[str, dict[str, Any]] = {}
    entries: Layer = {}
    for name in shapes:
        below = layers[0][name]
        for layer in layers[1:]:
            merged[name], entries[name] = _merge_section(name, below, layer[name], shapes=shapes)
            below = {
                key: Setting(value, entries[name][key].where if key in entries[name] else "recipe")
                for key, value in merged[name].items()
            }
    return merged, entries


def _merge_section(
    name: str,
    written: Mapping[str, Setting],
    changes: Mapping[str, Setting],
    *,
    shapes: Mapping[str, Shape],
) -> tuple[dict[str, Any], dict[str, Setting]]:
    """A section's values, and the entries they come from: overrides take precedence over the file.
    If an override switches the kind, keys of the file that only the old kind has are dropped."""
    shape = shapes[name]
    old = _kind(name, shape, written, shape.default_kind)
    kind = _kind(name, shape, changes, old)
    dropped = shape.fields(old).keys() - shape.fields(kind).keys()
    entries = {key: entry for key, entry in written.items() if key not in dropped} | dict(changes)
    values = {}
    for key, entry in entries.items():
        field = shape.fields(kind).get(key)
        if field is None:
            raise unknown_key(name, key, entry.where, shapes=shapes, kind=kind)
        layers = [layer[key] for layer in (written, changes) if key in layer]
        values[key] = entry.value if _tagged(field) is None else _nested(name, key, field, layers)
    return values | ({} if shape.tag is None else {shape.tag: kind}), entries


def _nested(section: str, key: str, field: Any, layers: Sequence[Setting]) -> Any:
    """The value of a field that has kinds of its own (`objective.loss`): merged like a section,
    with the overrides taking precedence over the file."""
    name, tagged = f"{section}.{key}", _tagged(field)
    assert tagged is not None
    values = [tagged.spread(layer.value) for layer in layers]
    if not isinstance(values[-1], dict):
        return values[-1]  # refused later, with the place where it was written
    parts = [
        {str(part): Setting(inner, layer.where) for part, inner in value.items()}
        for value, layer in zip(values, layers, strict=True)
        if isinstance(value, dict)
    ]
    changes = parts[1] if len(parts) == 2 else {}
    return _merge_section(name, parts[0], changes, shapes={name: _shape_of(field)})[0]


def one_line(error: ValidationError, *, entries: Layer, where: str) -> BadInput:
    """The first error of pydantic, with its place, the value, and how many more there are."""
    first, more = error.errors()[0], error.error_count() - 1
    section, key, *_ = [*map(str, first["loc"]), "", ""]
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    entry = entries.get(section, {}).get(key)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "a value is required"
    elif not isinstance(first["input"], dict | BaseModel):
        message = f"{message[0].lower()}{message[1:]}, got {shown(first['input'])}"
    what = f"{name}: {message}" if name else message
    what += f" (and {more} more)" if more else ""
    return BadInput(what, where=entry.where if entry is not None else where)


def _recipe_text(path: Path) -> bytes:
    """The text of a recipe, which may also be a pipe: `fledge plan <(make-recipe)`."""
    if path.is_fifo():
        with path.open("rb") as pipe:
            return pipe.read(MAX_BYTES)
    return read_bytes(path, what="the recipe")


def _has_parts(annotation: Any) -> bool:
    """Whether a field is a mapping, or a section within a section (`target.parallel`)."""
    return get_origin(annotation) is dict or hasattr(annotation, "model_fields")


def _override_value(raw: str, where: str) -> Any:
    if not raw.strip():
        raise BadInput("the value is missing", where=where, fix="write null for none")
    try:
        return parse_yaml(raw, where=where)[0]
    except BadInput as error:
        fix = "put the value in double quotes inside single ones: 'section.key=\"value\"'"
        raise BadInput(error.what, where=where, fix=fix) from error


def _with_value(base: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with one value set."""
    if len(keys) == 1:
        return {**base, keys[0]: value}
    inner = base.get(keys[0])
    return {**base, keys[0]: _with_value(inner if isinstance(inner, dict) else {}, keys[1:], value)}


def _kind(name: str, shape: Shape, layer: Mapping[str, Setting], default: str) -> str:
    """The kind that a file, or the overrides, select: by the tag, else by a key that only one kind
    has and requires (`target.cached_target_path`)."""
    if shape.tag is None:
        return default
    if shape.tag not in layer:
        present = {key for key, entry in layer.items() if entry.value is not None}
        for kind in shape.kinds:
            fields = shape.fields(kind)
            if any(fields[key].is_required() for key in present & fields.keys()):
                return kind
        return default
    entry = layer[shape.tag]
    if not isinstance(entry.value, str) or entry.value not in shape.kinds:
        what = f"{name}.{shape.tag}: unknown {shape.tag} {shown(entry.value)}"
        fix = nearest(str(entry.value), sorted(shape.kinds))
        raise BadInput(what, where=entry.where, fix=fix)
    return entry.value
