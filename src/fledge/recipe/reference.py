"""The reference of all recipe fields, written from the schema itself: JSON schema and Markdown."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from fledge.core.settings import Tagged
from fledge.objective.losses.base import Loss
from fledge.recipe.layers import Shape
from fledge.recipe.schema import Recipe, recipe_shapes


def json_schema() -> dict[str, Any]:
    """For editors: point `# yaml-language-server: $schema=...` at a file with this content."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return schema | Recipe.model_json_schema(by_alias=False)


def markdown() -> str:
    """One table per section and kind; docs/recipes.md carries it, and a test compares."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    for section, shape in recipe_shapes().items():
        described = Recipe.model_fields[section].description
        yield f"### `{section}`: {_sentence(described)}"
        yield ""
        for kind, model in shape.kinds.items():
            if shape.tag is not None:
                yield f"**`{section}.{shape.tag}={kind}`** {_plain(model.__doc__)}"
                yield ""
            yield "| key | default | meaning |"
            yield "|---|---|---|"
            for key, field in _fields(model, shape):
                default = "required" if field.is_required() else _default(field)
                yield f"| `{key}` | {default} | {_plain(field.description)} |"
            yield ""
        for key in sorted(shape.all_keys()):
            yield from _nested_lines(f"{section}.{key}", shape.nested(key))


def _fields(model: type[BaseModel], shape: Shape) -> Iterator[tuple[str, Any]]:
    """Every key; a section within the section by the keys in it."""
    for key, field in model.model_fields.items():
        parts = getattr(field.annotation, "model_fields", None)
        if parts and shape.nested(key) is None:
            yield from ((f"{key}.{part}", within) for part, within in parts.items())
        else:
            yield key, field


def _nested_lines(name: str, tagged: Tagged | None) -> Iterator[str]:
    """The kinds of one field, each with its parameters: one table."""
    if tagged is None:
        return
    yield f"**`{name}`** by its {tagged.tag}, each with its parameters:"
    yield ""
    yield f"| `{name}` | default | meaning |"
    yield "|---|---|---|"
    for kind, model in tagged.kinds().items():
        yield f"| `{kind}` | | {_plain(model.__doc__)} |"
        for key, field in model.model_fields.items():
            if key != tagged.tag:
                yield f"| `{kind}`: `{key}` | {_default(field)} | {_plain(field.description)} |"
    yield ""


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Loss):
        value = value.kind
    if isinstance(value, tuple):
        value = list(value)
    return f"`{json.dumps(value) if value is None or isinstance(value, bool) else value}`"


def _plain(text: str | None) -> str:
    """On one line, and in one cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    words = _plain(text).rstrip(".")
    return words[:1].lower() + words[1:]
