"""Sizes of a template's values, and upper bounds on the sizes of results of operations.

The bounds are computed before the operation runs: that is what stops `'a' * 10**10`. Results of
operations that are not listed are no larger than their inputs (times a constant).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

ENDLESS = 1 << 62  # a size that no allowance covers
PART = 64  # size of any item besides its characters: visiting it takes about as long
_NUMBER = re.compile(r"\d+")


def weight(value: Any, most: int) -> int:
    """The size of a value with everything in it, or any number above `most`. A part counts as often
    as it occurs: `x = [x, x]` thirty times is a small object, but gigabytes of text."""
    total, pending = 0, [value]
    while pending and total <= most:
        item = pending.pop()
        total += PART
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        elif hasattr(item, "__len__"):  # a range or a dictionary view
            total += len(item)
    return total


def _depth(value: Any) -> int:
    """How deeply lists and dictionaries are nested."""
    depth, level = 0, [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        depth, level = depth + 1, inner
    return depth


def product_size(operator: str, left: Any, right: Any) -> int:
    """Bound for `left * right`, `left % right` (which formats strings) and `left ** right`."""
    if operator == "%":
        return _formatted(left, right) if isinstance(left, str | bytes) else 0
    if operator == "**":
        return ENDLESS if isinstance(right, int) and abs(right) > 512 else 0
    sequence: Any = right if isinstance(left, int) else left
    times = left if isinstance(left, int) else right
    if not isinstance(times, int) or isinstance(sequence, int | float):
        return 0
    size: int = len(sequence) if isinstance(sequence, str | bytes) else weight(sequence, ENDLESS)
    return size * max(0, times)


def _formatted(text: Any, *args: Any, **kwargs: Any) -> int:
    """Bound for a format: each field may be as wide as the largest number given plus all values."""
    if isinstance(text, bytes):
        return ENDLESS
    widths = [int(digits) if len(digits) < 10 else ENDLESS for digits in _NUMBER.findall(text)]
    numbers = _numbers((args, kwargs))
    widest = 64 + max(widths, default=0) + max(numbers, default=0) + weight((args, kwargs), ENDLESS)
    fields: int = max(text.count("%"), text.count("{"))
    return len(text) + fields * widest


def _numbers(value: Any) -> list[int]:
    """The integers among the arguments, any of which may be a width."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [abs(value)] if isinstance(value, int) else []


def _padded(text: Any, width: Any = 80, *_: Any) -> int:
    return width if isinstance(width, int) else 0


def _with_tabs(text: Any, tabsize: Any = 8) -> int:
    return len(text) * max(1, tabsize) if isinstance(tabsize, int) else 0


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = (x if isinstance(x, bytes) else str(x) for x in (text, old, new))
    return len(text) + int(text.count(old)) * len(new)


def _joined(separator: Any, items: Any = ()) -> int:
    return len(items) * len(separator) if hasattr(items, "__len__") else 0


def _joined_by_filter(items: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return _joined(str(d), items)


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    columns = width if isinstance(width, int) else len(str(width))
    return (str(text).count("\n") + 1) * max(0, columns)


def _wrapped(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any,
    **__: Any,
) -> int:  # fmt: skip
    return len(text) * (1 + len(wrapstring or ""))


def _counted(_: Any, count: Any, *__: Any, **___: Any) -> int:
    return abs(count) if isinstance(count, int) else 0


def _rounded(_: Any, precision: Any = 0, *__: Any, **___: Any) -> int:
    return ENDLESS if isinstance(precision, int) and abs(precision) > 100 else 0


def _summed(_: Any, attribute: Any = None, start: Any = 0) -> int:
    return 0 if isinstance(start, int | float) else ENDLESS  # summing lists is quadratic


def _as_json(value: Any, ensure_ascii: Any = False, indent: Any = None, *_: Any, **__: Any) -> int:
    if indent is None:
        return 0
    columns = indent if isinstance(indent, int) else len(str(indent))
    return weight(value, ENDLESS) * (1 + max(0, columns) * _depth(value))


def _no_larger(*_: Any, **__: Any) -> int:
    return 0


_HARMLESS = (
    *("capitalize", "casefold", "copy", "count", "endswith", "find", "get", "index", "isalnum"),
    *("isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric"),
    *("isprintable", "isspace", "istitle", "isupper", "items", "keys", "lower", "lstrip"),
    *("partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit"),
    *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
    "values",
)
METHODS: dict[str, Callable[..., int]] = {  # of strings, lists, dictionaries and numbers
    **dict.fromkeys(_HARMLESS, _no_larger),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "expandtabs": _with_tabs,
    "join": _joined,
    "replace": _replaced,
}
ROOM_OF_FILTERS: dict[str, Callable[..., int]] = {
    "batch": _counted,
    "center": _padded,
    "format": _formatted,
    "indent": _indented,
    "join": _joined_by_filter,
    "replace": _replaced,
    "round": _rounded,
    "slice": _counted,
    "sum": _summed,
    "tojson": _as_json,
    "wordwrap": _wrapped,
}
