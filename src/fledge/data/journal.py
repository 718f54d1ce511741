"""What a long job has done so far, on disk: append-only parts, one line per row, one part per
process. `fledge regenerate` and the answers of `fledge eval` continue from it.

A process never touches the part of another one: it reads them all and begins its own. A line that
a killed process was writing is not whole JSON, and its row counts as not done; so does one that is
not of the job's kind. A row that failed may be tried again; of several lines about a row, a good
one wins.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.expected import OBJECT, Expected, Flag, Table, Whole
from fledge.core.reading import check, json_lines, parse_json

_PART = re.compile(r"part-(\d{6,12})\.jsonl")
_LINE = Table({"row": Whole(), "good": Flag()}, optional={"truncated": Flag()})
_LINE_BYTES = 1 << 28  # a row of the user's data and its answers
_DEPTH = 10_000  # and as deep as the data is


def json_line(value: Any) -> bytes:
    """One line of readable JSON; half a surrogate pair is kept as an escape."""
    try:
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value) + "\n").encode()


@dataclass(frozen=True)
class Entry:
    """Where a row's line is, and what it says in short."""

    path: Path
    offset: int
    size: int
    good: bool
    truncated: bool

    def read(self) -> dict[str, Any]:
        with self.path.open("rb") as handle:
            handle.seek(self.offset)
            return _parsed(handle.read(self.size), self.path)


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
    where, what = str(path), "a line of the journal"
    value: dict[str, Any] = parse_json(
        line, _LINE, where=where, what=what, finite=False, max_depth=_DEPTH
    )
    return value


class Journal:
    """The parts of one job; for one process at a time. `good` and `failed` are what its lines say
    about rows of either kind."""

    def __init__(
        self, directory: Path, *, good: Expected = OBJECT, failed: Expected = OBJECT
    ) -> None:
        self.directory, self._kinds = directory, {True: good, False: failed}
        directory.mkdir(parents=True, exist_ok=True)
        named = ((path, _PART.fullmatch(path.name)) for path in directory.iterdir())
        parts = {int(match[1]): path for path, match in named if match is not None}
        self.entries: dict[int, Entry] = {}
        for number in sorted(parts):
            self._read(parts[number])
        self._path = directory / f"part-{max(parts, default=-1) + 1:06d}.jsonl"
        self._handle: int | None = None
        self._size = 0

    def _read(self, path: Path) -> None:
        for offset, line in json_lines(path, line_bytes=_LINE_BYTES):
            with suppress(BadInput):  # cut short: this row is not done
                value = _parsed(line, path)
                check(value, self._kinds[value["good"]], where=str(path), what="a line")
                self._note(value, path, offset, len(line))

    def _note(self, value: dict[str, Any], path: Path, offset: int, size: int) -> None:
        entry = Entry(path, offset, size, value["good"], bool(value.get("truncated")))
        known = self.entries.get(value["row"])
        if known is None or entry.good or not known.good:
            self.entries[value["row"]] = entry

    def add(self, row: int, value: dict[str, Any], *, good: bool) -> None:
        """One line, in one write."""
        record = {"row": row, "good": good, **value}
        line = json_line(record)
        if self._handle is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._handle = os.open(self._path, flags, 0o666)
        written = os.write(self._handle, line)
        while written < len(line):  # a disk that is filling up writes less than it is given
            written += os.write(self._handle, line[written:])
        self._note(record, self._path, self._size, len(line))
        self._size += len(line)

    def close(self) -> None:
        if self._handle is not None:
            os.fsync(self._handle)
            os.close(self._handle)
            self._handle = None

    def good(self) -> Iterator[tuple[int, Entry]]:
        """The rows that are done, in the data's order."""
        return ((row, entry) for row, entry in sorted(self.entries.items()) if entry.good)

    def failed(self) -> Iterator[tuple[int, Entry]]:
        return ((row, entry) for row, entry in sorted(self.entries.items()) if not entry.good)
