"""Files that anybody may have written, read with suspicion: the one door for metadata.

A file is opened only if it is a regular one, read only up to a size, and parsed only as JSON that
means one thing: every key once, no NaN where a number is meant, not nested without end. What it
holds is then compared with a description of what it should hold, before anything is built of it:

    STATE = Table({"step": Whole(), "best": Maybe(Number(0))}, optional={"note": Text()})
    state = read_json(path, STATE, what="the state")

Whatever is wrong becomes one BadInput: the file, the field, what stands there, what was expected.
Keys that a description does not name are left alone: other versions write more, or less. Needs
neither pydantic nor torch: machines that only train read their files here too.
"""

import contextlib
import json
import os
import reprlib
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fledge.core.errors import BadInput, broken_files, first_line

MAX_BYTES = 16 << 20  # of a file that describes something; none of ours comes near
MAX_DEPTH = 64
_HUGE = sys.float_info.max
_SHOWN = 60  # characters of an offending value


# --- what a value should be ----------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """The first place where a value is not what it should be."""

    at: str  # `target.head.scale`, `rows[3]`; empty: the whole value
    value: object
    expected: str


class Kind(Protocol):
    """What a value should be."""

    def fault(self, value: Any, at: str) -> Fault | None:
        """None: it is."""


@dataclass(frozen=True)
class Anything:
    def fault(self, value: Any, at: str) -> Fault | None:
        return None


@dataclass(frozen=True)
class Whole:
    """A whole number; the default bounds fit a signed 64-bit count of bytes with room to spare."""

    low: int = 0
    high: int = 2**48

    def fault(self, value: Any, at: str) -> Fault | None:
        if type(value) is int and self.low <= value <= self.high:
            return None
        return Fault(at, value, f"a whole number from {self.low} to {self.high}")


@dataclass(frozen=True)
class Number:
    low: float = -_HUGE
    high: float = _HUGE

    def fault(self, value: Any, at: str) -> Fault | None:
        if type(value) in (int, float) and self.low <= value <= self.high:  # so NaN is none
            return None
        above = f" from {self.low:g}" if self.low > -_HUGE else ""
        below = f" up to {self.high:g}" if self.high < _HUGE else ""
        return Fault(at, value, f"a number{above}{below}")


@dataclass(frozen=True)
class Flag:
    def fault(self, value: Any, at: str) -> Fault | None:
        return None if type(value) is bool else Fault(at, value, "true or false")


@dataclass(frozen=True)
class Text:
    longest: int = 1 << 16

    def fault(self, value: Any, at: str) -> Fault | None:
        if isinstance(value, str) and len(value) <= self.longest:
            return None
        return Fault(at, value, f"text of at most {self.longest} characters")


@dataclass(frozen=True)
class FileName:
    """The name of a file beside the one that names it: never a path, so never another place."""

    def fault(self, value: Any, at: str) -> Fault | None:
        named = isinstance(value, str) and 0 < len(value) <= 255 and value not in (".", "..")
        if named and not any(mark in value for mark in ("/", "\\", "\0")):
            return None
        return Fault(at, value, "the name of a file in the same directory")


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    def fault(self, value: Any, at: str) -> Fault | None:
        if any(type(value) is type(known) and value == known for known in self.values):
            return None
        return Fault(at, value, f"one of {', '.join(map(str, self.values))}")


@dataclass(frozen=True)
class Maybe:
    """The same, or null."""

    kind: Kind

    def fault(self, value: Any, at: str) -> Fault | None:
        return None if value is None else self.kind.fault(value, at)


@dataclass(frozen=True)
class ListOf:
    kind: Kind
    most: int = 1 << 20
    least: int = 0

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            return Fault(at, value, f"a list of {self.least} to {self.most}")
        faults = (self.kind.fault(item, f"{at}[{i}]") for i, item in enumerate(value))
        return next(filter(None, faults), None)


@dataclass(frozen=True)
class Row:
    """A list of as many items as there are kinds, each of its own."""

    kinds: tuple[Kind, ...]

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, list) or len(value) != len(self.kinds):
            return Fault(at, value, f"a list of {len(self.kinds)}")
        pairs = enumerate(zip(self.kinds, value, strict=True))
        return next(filter(None, (kind.fault(x, f"{at}[{i}]") for i, (kind, x) in pairs)), None)


@dataclass(frozen=True)
class MapOf:
    """An object whose keys are names and whose values are all of one kind."""

    kind: Kind
    keys: Kind = field(default_factory=Text)

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, dict):
            return Fault(at, value, "an object")
        for key, item in value.items():
            found = self.keys.fault(key, f"{at}: key") or self.kind.fault(item, _inner(at, key))
            if found:
                return found
        return None


@dataclass(frozen=True)
class Table:
    """An object with these fields; `optional` ones may be absent, others may be there too."""

    fields: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, dict):
            return Fault(at, value, "an object")
        for key, kind in (*self.fields.items(), *self.optional.items()):
            if key not in value and key in self.optional:
                continue
            if found := kind.fault(value.get(key), _inner(at, key)):
                return found
        return None


OBJECT = Table()


def _inner(at: str, key: str) -> str:
    key = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
    return f"{at}.{key}" if at else key


def shown(value: object) -> str:
    """A value as a message quotes it: never long, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN
    text = short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check(value: Any, kind: Kind, *, where: str, what: str, fix: str = "") -> None:
    """Refuse a value that is not what it should be."""
    if found := kind.fault(value, ""):
        place = f"'{found.at}' is " if found.at else "it is "
        told = f"{what} is damaged: {place}{shown(found.value)}, expected {found.expected}"
        raise BadInput(told, where=where, fix=fix)


# --- files ---------------------------------------------------------------------------------------


def open_regular(
    path: Path, *, inside: Path | None = None, what: str = "the file"
) -> BinaryIO:
    """A file to read from: never a pipe, a device or a directory, on which one might wait forever.

    `inside` is the directory that a link may not lead out of.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # a name with a zero byte in it is a ValueError
        told = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{what} cannot be opened ({told.lower()})", where=str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInput(f"{what} is not a regular file", where=str(path), fix="put one there")
    if inside is not None:
        try:
            check_inside(path, inside)
        except BadInput:
            os.close(descriptor)
            raise
    return os.fdopen(descriptor, "rb")


def check_inside(path: Path, directory: Path) -> None:
    """Refuse a link out of a directory: it would be read, and written, somewhere else."""
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
    """All of a small file, however large it claims to be, or grows."""
    with open_regular(path, inside=inside, what=what) as handle:
        data = handle.read(max_bytes + 1)
    if len(data) > max_bytes:
        told = f"{what} has more than {max_bytes:,} bytes, which none has"
        raise BadInput(told, where=str(path), fix="is it the right file?")
    return data


def read_json(
    path: Path,
    kind: Kind = OBJECT,
    *,
    what: str = "the file",
    fix: str = "",
    max_bytes: int = MAX_BYTES,
    inside: Path | None = None,
    finite: bool = True,
) -> Any:
    """What a JSON file holds, if that is of this kind."""
    data = read_bytes(path, max_bytes=max_bytes, inside=inside, what=what)
    return parse_json(data, kind, where=str(path), what=what, fix=fix, finite=finite)


def parse_json(
    data: bytes | str,
    kind: Kind = OBJECT,
    *,
    where: str,
    what: str = "the file",
    fix: str = "",
    finite: bool = True,
) -> Any:
    """The value of a JSON text, if it is of this kind; `finite=False` lets NaN and infinity pass
    (in metrics, a diverged run has them)."""
    try:
        value = json.loads(data, object_pairs_hook=_once)
        _check_nesting(value, finite=finite)
    except RecursionError:
        raise BadInput(f"{what} cannot be read (nested too deeply)", where=where, fix=fix) from None
    except ValueError as error:
        told = f"{what} cannot be read (not JSON: {first_line(error)})"
        raise BadInput(told, where=where, fix=fix) from None
    check(value, kind, where=where, what=what, fix=fix)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two equal keys, readers disagree which one counts."""
    held = dict(pairs)
    if len(held) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} is given twice")
    return held


def _check_nesting(value: Any, *, finite: bool) -> None:
    """Level by level, not by recursion, which is what deep nesting attacks."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner.extend(_parts(item))
            if finite and type(item) is float and not -_HUGE <= item <= _HUGE:
                raise ValueError(f"{item} is not a number")
        if not inner:
            return
        level = inner
    raise RecursionError


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def json_lines(path: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of a file of JSON lines; a longer line is not one, and ends them."""
    with open_regular(path) as handle:
        offset = 0
        while line := handle.readline(max_bytes + 1):
            if len(line) > max_bytes:
                return
            yield offset, line
            offset += len(line)


# --- tensors -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """One line for whatever safetensors makes of a file; a pipe is never opened."""
    open_regular(path, what=what).close()
    try:
        yield
    except broken_files() as error:
        told, fix = f"{what} is broken ({first_line(error)})", "is it a safetensors file, and whole?"
        raise BadInput(told, where=str(path), fix=fix) from error


def tensor_shapes(path: Path, *, what: str = "the file") -> dict[str, tuple[int, ...]]:
    """The shapes in the header of a safetensors file, which its library has compared with the
    file's size; no tensor is read."""
    from safetensors import safe_open

    with _readable(path, what), safe_open(str(path), framework="np") as handle:
        return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}


def load_tensors(path: Path, *, what: str = "the file") -> dict[str, Any]:
    """All torch tensors of a safetensors file."""
    from safetensors.torch import load_file

    with _readable(path, what):
        tensors: dict[str, Any] = load_file(path)
    return tensors
