"""Prints the Markdown reference of all recipe fields: docs/recipes.md contains it, and a test
compares them.

    python tools/recipe_reference.py
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from fledge.core.settings import MOST, Tagged
from fledge.methods.section import LossChoice
from fledge.recipe.schema import Recipe, recipe_shapes


def markdown() -> str:
    """One table per section and kind."""
    return "\n".join(_lines()).rstrip() + "\n"


_HEADER = "| {} | values | default | meaning |\n|---|---|---|---|"


def _lines() -> Iterator[str]:
    for section, shape in recipe_shapes().items():
        description = Recipe.model_fields[section].description
        yield f"### `{section}`: {_sentence(description)}"
        yield ""
        for kind, model in shape.kinds().items():
            if shape.tag:
                yield f"**`{section}.{shape.tag}={kind}`** {_plain(model.__doc__)}"
                yield ""
            yield _HEADER.format("key")
            yield from _rows(model)
            yield ""
        for key in sorted(shape.all_keys()):
            if (inner := shape.inner(key)) is not None and inner.tag:
                yield f"**`{section}.{key}`** by its {inner.tag}, each with its parameters:"
                yield ""
                yield _HEADER.format(f"`{section}.{key}`")
                for kind, model in inner.kinds().items():
                    yield f"| `{kind}` | | | {_plain(model.__doc__)} |"
                    yield from _rows(model, f"`{kind}`: ", but=inner.tag)
                yield ""


def _rows(model: type[BaseModel], before: str = "", but: str = "") -> Iterator[str]:
    """A row for every key; a section within the section is expanded into its keys."""
    schemas = model.model_json_schema()["properties"]
    for key, field in model.model_fields.items():
        annotation: Any = field.annotation
        if (inner := Tagged.of(field)) is not None and not inner.tag:
            yield from (row.replace("`", f"`{key}.", 1) for row in _rows(annotation))
        elif key != but:
            default = "required" if field.is_required() else _default(field)
            meaning = _plain(field.description)
            yield f"| {before}`{key}` | {_allowed(schemas[key])} | {default} | {meaning} |"


_TYPES = {"integer": "whole number", "number": "number", "string": "text", "object": "mapping"}
_BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "up to {}", "lt": "below {}"}  # MOST: no limit


def _allowed(schema: dict[str, Any]) -> str:
    """The values of a key in words, from its JSON schema: `whole number above 0, or null`."""
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "pattern" in schema:  # of a device
        names = schema["pattern"][2:-2].replace(r"(:\d+)?", "|cuda:N").split("|")
        return ", ".join(f"`{name}`" for name in names)
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"list of {len(items)}: {_allowed(items[0])}"
    if schema.get("type") == "array":
        return f"list of: {_allowed(schema['items'])}"
    if schema.get("type") == "boolean":
        return "`true`, `false`"
    branches = schema.get("anyOf", [])
    or_null = ", or `null`" if {"type": "null"} in branches else ""
    branch: dict[str, Any] = branches[0] if branches else {}
    if or_null or "enum" in branch:  # a loss: its names here, its mappings in a table of their own
        return _allowed(branch) + (or_null or ", or a mapping")
    kind = _TYPES[branch.get("type") or schema["type"]]
    limits = {name: schema[name] for name in _BOUNDS if name in schema}
    if {"ge", "gt"} <= limits.keys():  # name only the stricter one
        del limits["gt" if limits["ge"] > limits["gt"] else "ge"]
    bounds = [_BOUNDS[name].format(bound) for name, bound in limits.items() if bound != MOST]
    return " ".join([kind, *bounds])


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, LossChoice):
        value = value.kind
    if isinstance(value, tuple):
        value = list(value)
    return f"`{json.dumps(value) if value is None or isinstance(value, bool) else value}`"


def _plain(text: str | None) -> str:
    """The text on one line, escaped for a table cell."""
    return " ".join((text or "").split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    sentence = _plain(text).rstrip(".")
    return sentence[:1].lower() + sentence[1:]


if __name__ == "__main__":
    print(markdown(), end="")
