"""What a long job has done so far, on disk: append-only parts, one line per row, one part per
process. `fledge regenerate` and the answers of `fledge eval` continue from it.

A process never touches the part of another one: it reads them all, begins its own, and may look
again at what the others have added. A line that a killed process was writing is not whole JSON,
and its row counts as not done; so does one that is not of the job's kind. A row that failed may be
tried again; of several lines about a row, a good one wins, and of those that of the latest part:
whoever reads the parts, in whichever order, finds the same.
"""

import itertools
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
from fledge.core.files import removed
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

    @property
    def rank(self) -> tuple[bool, int, str, int]:
        """Of two lines about a row, the one of the higher rank counts."""
        return self.good, len(self.path.name), self.path.name, self.offset

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
    """The parts of one job. `good` and `failed` are what its lines say about rows of either
    kind."""

    def __init__(
        self, directory: Path, *, good: Expected = OBJECT, failed: Expected = OBJECT
    ) -> None:
        self.directory, self._kinds = directory, {True: good, False: failed}
        directory.mkdir(parents=True, exist_ok=True)
        self.entries: dict[int, Entry] = {}
        self.sizes: dict[str, int] = {}  # of each part, as far as it was read
        self._path: Path | None = None  # of our own part, once there is one
        self._handle: int | None = None
        self._unsynced = False
        self.read_new()

    def read_new(self) -> set[int]:
        """Read what others have written since the last time; the rows it is about."""
        rows = set()
        for _, path in sorted(self._parts().items()):
            if path == self._path:
                continue
            try:
                if self.sizes.get(path.name, -1) < path.stat().st_size:
                    rows |= self._read_part(path)
            except (FileNotFoundError, BadInput):
                if path.exists():  # else the job is over, and another process has removed it
                    raise
        return rows

    def _parts(self) -> dict[int, Path]:
        try:
            found = list(self.directory.iterdir())
        except FileNotFoundError:
            raise removed(self.directory) from None
        named = ((path, _PART.fullmatch(path.name)) for path in found)
        return {int(match[1]): path for path, match in named if match is not None}

    def _read_part(self, path: Path) -> set[int]:
        rows = set()
        start = self.sizes.setdefault(path.name, 0)
        for offset, line in json_lines(path, line_bytes=_LINE_BYTES, start=start):
            if line.endswith(b"\n"):  # else it may still grow, and is read again
                self.sizes[path.name] = offset + len(line)
            with suppress(BadInput):  # cut short: this row is not done
                value = _parsed(line, path)
                check(value, self._kinds[value["good"]], where=str(path), what="a line")
                self._note(value, path, offset, len(line))
                rows.add(value["row"])
        return rows

    def _note(self, value: dict[str, Any], path: Path, offset: int, size: int) -> None:
        entry = Entry(path, offset, size, value["good"], bool(value.get("truncated")))
        known = self.entries.get(value["row"])
        if known is None or entry.rank > known.rank:
            self.entries[value["row"]] = entry

    def add(self, row: int, value: dict[str, Any], *, good: bool) -> None:
        """One line, in one write."""
        record = {"row": row, "good": good, **value}
        line = json_line(record)
        if self._handle is None or self._path is None:
            self._handle, self._path = self._begin_part()
        written = os.write(self._handle, line)
        while written < len(line):  # a disk that is filling up writes less than it is given
            written += os.write(self._handle, line[written:])
        self._unsynced = True
        offset = self.sizes[self._path.name]
        self._note(record, self._path, offset, len(line))
        self.sizes[self._path.name] = offset + len(line)

    def _begin_part(self) -> tuple[int, Path]:
        """A part of our own, after all that are there: what we add outranks what we have read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for number in itertools.count(max(self._parts(), default=-1) + 1):
            path = self.directory / f"part-{number:06d}.jsonl"
            with suppress(FileExistsError):  # another process was quicker
                handle = os.open(path, flags, 0o666)
                self.sizes[path.name] = 0
                return handle, path
        raise AssertionError("numbers do not end")

    def sync(self) -> None:
        """What was added is on the disk, and seen by other machines."""
        if self._handle is not None and self._unsynced:
            os.fsync(self._handle)
            self._unsynced = False

    def close(self) -> None:
        if self._handle is not None:
            self.sync()
            os.close(self._handle)
            self._handle = None

    def good(self) -> Iterator[tuple[int, Entry]]:
        """The rows that are done, in the data's order."""
        return ((row, entry) for row, entry in sorted(self.entries.items()) if entry.good)

    def failed(self) -> Iterator[tuple[int, Entry]]:
        return ((row, entry) for row, entry in sorted(self.entries.items()) if not entry.good)
