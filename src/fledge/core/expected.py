"""What a value from a file should be, said before it is read: small descriptions, put together.

    STATE = Table({"step": Whole(), "best": Maybe(Number(0))}, optional={"note": Text()})
    STATE.fault({"step": -1, "best": None}, "")  # Fault("step", -1, "a whole number from 0 to ...")

Keys that a description does not name are left alone: other versions write more, or less.
`core.reading` turns a fault into the one line that a user reads. Needs neither pydantic nor torch:
machines that only train read their files too.
"""

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_HUGE = sys.float_info.max
_SHOWN = 60  # characters of an offending value


@dataclass(frozen=True)
class Fault:
    """The first place where a value is not what it should be."""

    at: str  # `target.head.scale`, `rows[3]`; empty: the whole value
    value: object
    expected: str


class Expected(Protocol):
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

    kind: Expected

    def fault(self, value: Any, at: str) -> Fault | None:
        return None if value is None else self.kind.fault(value, at)


@dataclass(frozen=True)
class ListOf:
    kind: Expected
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

    kinds: tuple[Expected, ...]

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, list) or len(value) != len(self.kinds):
            return Fault(at, value, f"a list of {len(self.kinds)}")
        pairs = enumerate(zip(self.kinds, value, strict=True))
        return next(filter(None, (kind.fault(x, f"{at}[{i}]") for i, (kind, x) in pairs)), None)


@dataclass(frozen=True)
class MapOf:
    """An object whose keys are names and whose values are all of one kind."""

    kind: Expected
    keys: Expected = field(default_factory=Text)

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

    fields: Mapping[str, Expected] = field(default_factory=dict)
    optional: Mapping[str, Expected] = field(default_factory=dict)

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, dict):
            return Fault(at, value, "an object")
        for key, kind in (*self.fields.items(), *self.optional.items()):
            if key in value:
                found = kind.fault(value[key], _inner(at, key))
            else:
                found = None if key in self.optional else Fault(_inner(at, key), _ABSENT, "a value")
            if found:
                return found
        return None


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
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
