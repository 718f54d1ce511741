"""Metadata from files: JSON of limited size, checked against a description before it is used.

    state = read_json(path, STATE, what="the state")

Any fault becomes one BadInput: the file, the field, its value, and what was expected. Needs neither
pydantic nor torch: machines that only train may lack pydantic.
"""

import json
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fledge.core.errors import BadInput, broken_files, first_line

MAX_BYTES = 1 << 30  # of a metadata file
_HUGE = sys.float_info.max
_SHOWN = 60  # characters of an offending value

# --- expected ------------------------------------------------------------------------------------
# Descriptions of values, composed of small ones:
#
# STATE = Table({"step": Whole(), "best": Maybe(Number(0))}, optional={"note": Text()})
# STATE.fault({"step": -1, "best": None})  # "'step' is -1, expected a whole number from 0 to ..."


@dataclass(frozen=True, eq=False)
class Expected:
    """A description of a value: in words, as a test, and of the parts (place, value, kind) that an
    accepted value has."""

    words: str
    accepts: Callable[[Any], bool]
    parts: "Callable[[Any], Iterable[tuple[str, Any, Expected]]]" = lambda value: ()

    def fault(self, value: Any, at: str = "") -> str | None:
        """The first fault of a value found at `at`, or None if it is as expected."""
        if not self.accepts(value):
            place = f"'{at}'" if at else "it"
            return f"{place} is {shown(value)}, expected {self.words}"
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


def Choice(values: tuple[str, ...]) -> Expected:
    words = f"one of {', '.join(values)}"
    return Expected(words, lambda value: isinstance(value, str) and value in values)


def Maybe(kind: Expected) -> Expected:
    """A value of that kind, or null."""
    return Expected(
        kind.words,
        lambda value: value is None or kind.accepts(value),
        lambda value: () if value is None else [("", value, kind)],
    )


def ListOf(kind: Expected, most: int = 1 << 20, least: int = 0) -> Expected:
    return Expected(
        f"a list of {least} to {most}",
        lambda value: isinstance(value, list) and least <= len(value) <= most,
        lambda value: ((f"[{i}]", item, kind) for i, item in enumerate(value)),
    )


def MapOf(kind: Expected) -> Expected:
    """An object whose values are all of one kind."""
    return Expected(
        "an object",
        lambda value: isinstance(value, dict),
        lambda value: ((f".{key}", item, kind) for key, item in value.items()),
    )


class Table(Expected):
    """An object with these fields; `optional` ones may be absent. Others are ignored: other
    versions may write more or fewer."""

    fields: Mapping[str, Expected]
    optional: Mapping[str, Expected]

    def __init__(
        self, fields: Mapping[str, Expected] | None = None,
        optional: Mapping[str, Expected] | None = None,
    ) -> None:  # fmt: skip
        def parts(value: dict[str, Any]) -> Iterator[tuple[str, Any, Expected]]:
            for key, kind in (*self.fields.items(), *self.optional.items()):
                if key in value:
                    yield f".{key}", value[key], kind

        super().__init__("an object", lambda value: isinstance(value, dict), parts)
        self.__dict__.update(fields=fields or {}, optional=optional or {})

    def fault(self, value: Any, at: str = "") -> str | None:
        if isinstance(value, dict):
            for key in self.fields:
                if key not in value:
                    return f"'{f'{at}.{key}'.removeprefix('.')}' is absent"
        return super().fault(value, at)


OBJECT = Table()


def shown(value: object) -> str:
    """A value as a message quotes it: short, however large or deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN
    text = short.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check(value: Any, expected: Expected, *, where: str, what: str, fix: str = "") -> None:
    """Refuse a value that is not as expected."""
    if fault := expected.fault(value):
        raise BadInput(f"{what} is damaged: {fault}", where=where, fix=fix)


# --- reading --------------------------------------------------------------------------------------


def open_file(path: Path, *, what: str = "the file") -> BinaryIO:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{what} cannot be opened ({reason})", where=str(path)) from error


def read_bytes(path: Path, *, what: str = "the file") -> bytes:
    """The contents of a small file."""
    with open_file(path, what=what) as handle:
        try:
            data = handle.read(MAX_BYTES + 1)
        except OSError as error:  # a failing disk
            raise BadInput(f"{what} cannot be read ({error.strerror})", where=str(path)) from error
    if len(data) > MAX_BYTES:
        what = f"{what} has more than {MAX_BYTES:,} bytes"
        raise BadInput(what, where=str(path), fix="is it the right file?")
    return data


def read_json(
    path: Path, expected: Expected = OBJECT, *, what: str = "the file", fix: str = ""
) -> Any:
    """The value of a JSON file, checked against `expected`."""
    return parse_json(read_bytes(path, what=what), expected, where=str(path), what=what, fix=fix)


def parse_json(
    data: bytes | str,
    expected: Expected = OBJECT,
    *,
    where: str,
    what: str = "the file",
    fix: str = "",
) -> Any:
    """The value of a JSON text, checked against `expected`. NaN is accepted where no number is
    expected: metrics of a diverged run have it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        message = f"{what} cannot be read (not JSON: {first_line(error)})"
        raise BadInput(message, where=where, fix=fix) from None
    check(value, expected, where=where, what=what, fix=fix)
    return value


def load_tensors(
    path: Path, *, what: str = "the file", keep: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """The torch tensors of a safetensors file: all, or those whose names `keep` accepts."""
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in filter(keep, handle.keys())}
    except broken_files() as error:
        message, fix = f"{what} is broken ({first_line(error)})", "is it a whole safetensors file?"
        raise BadInput(message, where=str(path), fix=fix) from error
