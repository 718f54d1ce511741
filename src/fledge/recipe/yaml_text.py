"""YAML for recipes: the small core of YAML 1.2, with line numbers and without surprises.

PyYAML's own rules read `1e-4` as a string, `no` as false and `1:30` as ninety, and let the second
of two equal keys win silently. Here a number is a number, only true and false are booleans, and
duplicate keys are refused. Does not import torch.
"""

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

from fledge.core.errors import BadInput

_MAX_BYTES = 1 << 18  # recipes have a few thousand
_MAX_DEPTH = 32
_LINES_DEPTH = 3  # levels with line numbers: section, key, part of its value
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_RESOLVERS = (
    ("tag:yaml.org,2002:null", re.compile(r"~$|null$|Null$|NULL$|$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"true$|True$|TRUE$|false$|False$|FALSE$"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML fills it)

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Limit the depth: PyYAML's time is quadratic in open brackets, thousands take minutes."""
        if self.flow_level >= _MAX_DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases: a few lines of aliases to aliases stand for billions of values."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "no aliases here: write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refused(f"key '{key.value}' is given twice", key)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either set of rules would read as something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML adds to it)
        first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))  # 010 is ten


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    if text.endswith(".inf"):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text == ".nan" else float(text)


def _represent_tuple(dumper: yaml.SafeDumper, value: tuple[Any, ...]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Escape rare line breaks (NEL, U+2028), which PyYAML would otherwise fold away."""
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Dumper.add_representer(tuple, _represent_tuple)
_Dumper.add_representer(str, _represent_str)


def parse_yaml(text: str | bytes, *, where: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """The value of a YAML text, and the line of every key in its first levels."""
    if len(text) > _MAX_BYTES:
        raise BadInput(f"YAML: more than {_MAX_BYTES:,} bytes", where=where, fix="is it a recipe?")
    try:
        loader = _Loader(text)  # the constructor already reads the beginning
        try:
            node = loader.get_single_node()
            lines = _lines(node)
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        problem = error.problem or ""
        if problem.startswith("but ") or not problem:  # the context is its first half
            problem = f"{error.context} {problem}"
        raise BadInput(f"YAML: {problem}", where=at) from error
    except yaml.YAMLError as error:  # a byte that is not allowed in text
        raise BadInput(f"YAML: {error}", where=where) from error
    except ValueError as error:  # a number with too many digits
        raise BadInput(f"YAML: a value cannot be read ({error})", where=where) from error
    except RecursionError as error:
        raise BadInput("YAML: nested too deeply", where=where) from error
    return value, lines


def dump_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _refused(why: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, why, node.start_mark)


def _lines(root: yaml.Node | None) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}

    def note(node: yaml.Node | None, above: tuple[str, ...]) -> None:
        for key, body in node.value if isinstance(node, yaml.MappingNode) else []:
            place = (*above, str(key.value))
            lines[place] = key.start_mark.line + 1
            if len(place) < _LINES_DEPTH:
                note(body, place)

    note(root, ())
    return lines
