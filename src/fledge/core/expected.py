"""Schemas for values read from files, composed of small descriptions.

    STATE = Table({"step": Whole(), "best": Maybe(Number(0))}, optional={"note": Text()})
    STATE.fault({"step": -1, "best": None}, "")  # Fault("step", -1, "a whole number from 0 to ...")

Keys that a description does not name are ignored: other versions may write more or fewer.
`core.reading` turns a fault into the one line that a user reads. Needs neither pydantic nor torch.
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
    """The first part of a value that is not as expected."""

    at: str  # `target.head.scale`, `rows[3]`; empty: the value itself
    value: object
    expected: str


class Expected(Protocol):
    """A description of a value."""

    def fault(self, value: Any, at: str) -> Fault | None:
        """The first fault of a value found at `at`, or None if it is as expected."""


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
        if type(value) in (int, float) and self.low <= value <= self.high:  # rejects NaN, too
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
    """The name of a file in the same directory as the file that mentions it; never a path."""

    def fault(self, value: Any, at: str) -> Fault | None:
        is_name = isinstance(value, str) and 0 < len(value) <= 255 and value not in (".", "..")
        if is_name and not any(character in value for character in ("/", "\\", "\0")):
            return None
        return Fault(at, value, "the name of a file in the same directory")


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    def fault(self, value: Any, at: str) -> Fault | None:
        if any(type(value) is type(choice) and value == choice for choice in self.values):
            return None
        return Fault(at, value, f"one of {', '.join(map(str, self.values))}")


@dataclass(frozen=True)
class Maybe:
    """A value of that kind, or null."""

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
    """A list of fixed length whose items each have their own kind."""

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
            fault = self.keys.fault(key, f"{at}: key") or self.kind.fault(item, _inner(at, key))
            if fault:
                return fault
        return None


@dataclass(frozen=True)
class Table:
    """An object with these fields; `optional` ones may be absent, unknown ones are allowed."""

    fields: Mapping[str, Expected] = field(default_factory=dict)
    optional: Mapping[str, Expected] = field(default_factory=dict)

    def fault(self, value: Any, at: str) -> Fault | None:
        if not isinstance(value, dict):
            return Fault(at, value, "an object")
        for key, kind in (*self.fields.items(), *self.optional.items()):
            if key in value:
                fault = kind.fault(value[key], _inner(at, key))
            else:
                fault = None if key in self.optional else Fault(_inner(at, key), _ABSENT, "a value")
            if fault:
                return fault
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
    """A value as a message quotes it: short, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN
    text = short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
