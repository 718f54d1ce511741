"""YAML for recipes, with line numbers and without two surprises of PyYAML's.

PyYAML reads `1e-4` as a string, and lets the second of two equal keys win silently. Here it is a
number, and duplicate keys are refused. Does not import torch.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from fledge.core.errors import BadInput

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")  # 1e-4


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    None, None, f"key '{name}' is given twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_tuple(dumper: yaml.SafeDumper, value: tuple[Any, ...]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(tuple, _represent_tuple)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


def parse_yaml(text: str | bytes, *, where: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """The value of a YAML text, and the line of every key."""
    try:
        loader = _Loader(text)  # the constructor already reads the beginning
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
        return value, _lines(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        raise BadInput(f"YAML: {error.problem or error.context}", where=at) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"YAML: {error}", where=where) from error


def dump_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _lines(node: yaml.Node | None, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}
    for key, body in node.value if isinstance(node, yaml.MappingNode) else []:
        place = (*above, str(key.value))
        lines[place] = key.start_mark.line + 1
        lines |= _lines(body, place)
    return lines
