"""Reading files from untrusted sources: all metadata is read through here.

A file is opened only if it is a regular file, read only up to a size limit, and parsed only as
unambiguous JSON: no duplicate keys, no NaN in place of numbers, bounded nesting. Its contents are
then checked against a description, before anything is built from them:

    state = read_json(path, STATE, what="the state")

Any fault becomes one BadInput: the file, the field, its value, and what was expected.
"""

import contextlib
import json
import math
import os
import reprlib
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fledge.core.errors import BadInput, broken_files, first_line

# --- expected ------------------------------------------------------------------------------------
# Schemas for values read from files, composed of small descriptions.
#
# STATE = Table({"step": Whole(), "best": Maybe(Number(0))}, optional={"note": Text()})
# STATE.fault({"step": -1, "best": None})  # Fault("step", -1, "a whole number from 0 to ...")
#
# Needs neither pydantic nor torch: machines that only train may lack pydantic.


_HUGE = sys.float_info.max
_SHOWN = 60  # characters of an offending value


@dataclass(frozen=True)
class Fault:
    """The first part of a value that is not as expected."""

    at: str  # `target.head.scale`, `rows[3]`; empty: the value itself
    value: object
    expected: str


@dataclass(frozen=True, eq=False)
class Expected:
    """A description of a value: in words, as a test, and of the parts (place, value, kind) that an
    accepted value has."""

    words: str
    accepts: Callable[[Any], bool]
    parts: "Callable[[Any], Iterable[tuple[str, Any, Expected]]]" = lambda value: ()

    def fault(self, value: Any, at: str = "") -> Fault | None:
        """The first fault of a value found at `at`, or None if it is as expected."""
        if not self.accepts(value):
            return Fault(at, value, self.words)
        for place, part, kind in self.parts(value):
            if fault := kind.fault(part, (at + place).removeprefix(".")):
                return fault
        return None


def Anything() -> Expected:
    return Expected("anything", lambda value: True)


def Whole(low: int = 0, high: int = 2**48) -> Expected:
    """A whole number; the default bounds fit a signed 64-bit count of bytes with room to spare."""
    words = f"a whole number from {low} to {high}"
    return Expected(words, lambda value: type(value) is int and low <= value <= high)


def Number(low: float = -_HUGE, high: float = _HUGE) -> Expected:
    above = f" from {low:g}" if low > -_HUGE else ""
    words = f"a number{above}" + (f" up to {high:g}" if high < _HUGE else "")
    # the comparison rejects NaN, too
    return Expected(words, lambda value: type(value) in (int, float) and low <= value <= high)


def Flag() -> Expected:
    return Expected("true or false", lambda value: type(value) is bool)


def Text(longest: int = 1 << 16) -> Expected:
    words = f"text of at most {longest} characters"
    return Expected(words, lambda value: isinstance(value, str) and len(value) <= longest)


def FileName() -> Expected:
    """The name of a file in the same directory as the file that mentions it; never a path."""

    def accepts(value: Any) -> bool:
        is_name = isinstance(value, str) and 0 < len(value) <= 255 and value not in (".", "..")
        return is_name and not {"/", "\\", "\0"} & {*value}

    return Expected("the name of a file in the same directory", accepts)


def Choice(values: tuple[Any, ...]) -> Expected:
    words, known = f"one of {', '.join(map(str, values))}", [(type(v), v) for v in values]
    return Expected(words, lambda value: (type(value), value) in known)


def Maybe(kind: Expected) -> Expected:
    """A value of that kind, or null."""
    return Expected(
        kind.words,
        lambda value: value is None or kind.accepts(value),
        lambda value: () if value is None else kind.parts(value),
    )


def ListOf(kind: Expected, most: int = 1 << 20, least: int = 0) -> Expected:
    return Expected(
        f"a list of {least} to {most}",
        lambda value: isinstance(value, list) and least <= len(value) <= most,
        lambda value: ((f"[{i}]", item, kind) for i, item in enumerate(value)),
    )


def Row(kinds: tuple[Expected, ...]) -> Expected:
    """A list of fixed length whose items each have their own kind."""
    return Expected(
        f"a list of {len(kinds)}",
        lambda value: isinstance(value, list) and len(value) == len(kinds),
        lambda value: ((f"[{i}]", value[i], kind) for i, kind in enumerate(kinds)),
    )


def MapOf(kind: Expected, keys: Expected | None = None) -> Expected:
    """An object whose keys are names and whose values are all of one kind."""

    def parts(value: dict[str, Any]) -> Iterator[tuple[str, Any, Expected]]:
        for key, item in value.items():
            yield ": key", key, keys or Text()
            yield _place(key), item, kind

    return Expected("an object", lambda value: isinstance(value, dict), parts)


class Table(Expected):
    """An object with these fields; `optional` ones may be absent. Others are ignored: other
    versions may write more or fewer."""

    def __init__(
        self, fields: Mapping[str, Expected] | None = None,
        optional: Mapping[str, Expected] | None = None,
    ) -> None:  # fmt: skip
        def parts(value: dict[str, Any]) -> Iterator[tuple[str, Any, Expected]]:
            for key, kind in (*self.fields.items(), *self.optional.items()):
                if key in value:
                    yield _place(key), value[key], kind
                elif key not in self.optional:
                    yield _place(key), _ABSENT, _PRESENT

        super().__init__("an object", lambda value: isinstance(value, dict), parts)
        self.__dict__.update(fields=fields or {}, optional=optional or {})

    fields: Mapping[str, Expected]
    optional: Mapping[str, Expected]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
_PRESENT = Expected("a value", lambda value: value is not _ABSENT)
OBJECT = Table()


def _place(key: str) -> str:
    return f".{key}" if len(key) <= _SHOWN else f".{key[:_SHOWN]}..."


def shown(value: object) -> str:
    """A value as a message quotes it: short, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN
    text = short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


# --- reading --------------------------------------------------------------------------------------


MAX_BYTES = 16 << 20  # of a metadata file; ours are far smaller
MAX_DEPTH = 64


def check(value: Any, expected: Expected, *, where: str, what: str, fix: str = "") -> None:
    """Refuse a value that is not as expected."""
    if fault := expected.fault(value, ""):
        place = f"'{fault.at}' is " if fault.at else "it is "
        message = f"{what} is damaged: {place}{shown(fault.value)}, expected {fault.expected}"
        raise BadInput(message, where=where, fix=fix)


def open_regular(path: Path, *, inside: Path | None = None, what: str = "the file") -> BinaryIO:
    """Open a file for reading; refuses pipes and devices, which may block forever, and directories.

    `inside` is the directory that a link must not lead out of.
    """
    if inside is not None:
        check_inside(path, inside)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{what} cannot be opened ({reason})", where=str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        reason = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise BadInput(f"{what} is {reason}", where=str(path), fix="name a regular file")
    return os.fdopen(descriptor, "rb")


def check_inside(path: Path, directory: Path) -> None:
    """Refuse a link out of a directory: reads and writes would go elsewhere."""
    root = os.path.realpath(directory)
    if os.path.commonpath([root, os.path.realpath(path)]) != root:
        what = f"a link that leads out of '{directory}'"
        raise BadInput(what, where=str(path), fix="put the file itself there")


def read_bytes(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    inside: Path | None = None,
    what: str = "the file",
) -> bytes:
    """The contents of a small file; reads at most `max_bytes`, even if the file grows meanwhile."""
    try:
        with open_regular(path, inside=inside, what=what) as handle:
            data = handle.read(max_bytes + 1)
    except OSError as error:  # a failing disk
        raise BadInput(f"{what} cannot be read ({error.strerror})", where=str(path)) from error
    if len(data) > max_bytes:
        message = f"{what} has more than {max_bytes:,} bytes, which none has"
        raise BadInput(message, where=str(path), fix="is it the right file?")
    return data


def read_json(
    path: Path,
    expected: Expected = OBJECT,
    *,
    what: str = "the file",
    fix: str = "",
    max_bytes: int = MAX_BYTES,
    inside: Path | None = None,
    finite: bool = True,
) -> Any:
    """The value of a JSON file, checked against `expected`."""
    data = read_bytes(path, max_bytes=max_bytes, inside=inside, what=what)
    return parse_json(data, expected, where=str(path), what=what, fix=fix, finite=finite)


def parse_json(
    data: bytes | str,
    expected: Expected = OBJECT,
    *,
    where: str,
    what: str = "the file",
    fix: str = "",
    finite: bool = True,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """The value of a JSON text, checked against `expected`; `finite=False` accepts NaN and infinity
    (metrics of a diverged run have them)."""
    try:
        value = json.loads(data, object_pairs_hook=_without_duplicates)
        _check_nesting(value, max_depth, finite=finite)
    except RecursionError:
        raise BadInput(f"{what} cannot be read (nested too deeply)", where=where, fix=fix) from None
    except ValueError as error:
        message = f"{what} cannot be read (not JSON: {first_line(error)})"
        raise BadInput(message, where=where, fix=fix) from None
    check(value, expected, where=where, what=what, fix=fix)
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: parsers disagree about which one counts."""
    items = dict(pairs)
    if len(items) < len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(duplicate)} is given twice")
    return items


def _check_nesting(value: Any, max_depth: int, *, finite: bool) -> None:
    """Limit the depth level by level; recursion is what deep nesting would break."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for item in level:
            inner.extend(_children(item))
            if finite and type(item) is float and not math.isfinite(item):
                raise ValueError(f"{item} is not a number")
        if not inner:
            return
        level = inner
    raise RecursionError


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def json_lines(
    path: Path, *, line_bytes: int = MAX_BYTES, most_bytes: int = 2**48, start: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of a JSON lines file, starting at a line's offset, one at a time."""
    with open_regular(path) as handle:
        offset = handle.seek(start)
        while line := handle.readline(line_bytes + 1):
            if len(line) > line_bytes or offset + len(line) > most_bytes:
                what = f"a line over {line_bytes:,} bytes, or more than {most_bytes:,} in all"
                raise BadInput(what, where=str(path), fix="is it the right file?")
            yield offset, line
            offset += len(line)


# --- tensors -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """Turn any error of safetensors into one BadInput; refuses pipes before they are opened."""
    open_regular(path, what=what).close()
    try:
        yield
    except broken_files() as error:
        message, fix = f"{what} is broken ({first_line(error)})", "is it a whole safetensors file?"
        raise BadInput(message, where=str(path), fix=fix) from error


def load_tensors(
    path: Path, *, what: str = "the file", keep: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """The torch tensors of a safetensors file: all, or those whose names `keep` accepts."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with _readable(path, what):
        if keep is None:
            tensors: dict[str, Any] = load_file(path)
            return tensors
        with safe_open(str(path), framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in filter(keep, handle.keys())}
