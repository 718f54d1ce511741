"""The progress of a long job on disk: append-only parts, one line per row, one part per process.
`fledge regenerate` and the answers of `fledge eval` resume from it.

A process never writes to the part of another one: it reads them all, creates its own, and may later
read what the others have added. A line that a killed process was writing is incomplete JSON, and
its row counts as not done; so does a line of another kind of job. A row that failed may be retried.
Of several lines about a row, a good one wins, and among good ones that of the latest part, so the
result does not depend on who reads the parts in which order.
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
from fledge.core.files import removed
from fledge.core.reading import OBJECT, Expected, Flag, Table, Whole, check, json_lines, parse_json

_PART = re.compile(r"part-(\d{6,12})\.jsonl")
_LINE = Table({"row": Whole(), "good": Flag()}, optional={"truncated": Flag()})
_LINE_BYTES = 1 << 28  # a line holds a row of the user's data and its answers
_DEPTH = 10_000  # of nesting, which is that of the data


def json_line(value: Any) -> bytes:
    """One line of readable JSON; lone surrogates are kept as escapes."""
    try:
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value) + "\n").encode()


@dataclass(frozen=True)
class Entry:
    """Where a row's line is, and its main facts."""

    path: Path
    offset: int
    size: int
    good: bool
    truncated: bool

    @property
    def rank(self) -> tuple[bool, int, str, int]:
        """Of two lines about a row, the one with the higher rank counts."""
        return self.good, len(self.path.name), self.path.name, self.offset

    def read(self) -> dict[str, Any]:
        with self.path.open("rb") as handle:
            handle.seek(self.offset)
            return _parse_line(handle.read(self.size), self.path)


def _parse_line(line: bytes, path: Path) -> dict[str, Any]:
    where, what = str(path), "a line of the journal"
    value: dict[str, Any] = parse_json(
        line, _LINE, where=where, what=what, finite=False, max_depth=_DEPTH
    )
    return value


class Journal:
    """The parts of one job. `good` and `failed` describe what its lines hold for rows of either
    kind."""

    def __init__(
        self, directory: Path, *, good: Expected = OBJECT, failed: Expected = OBJECT
    ) -> None:
        self.directory, self._kinds = directory, {True: good, False: failed}
        directory.mkdir(parents=True, exist_ok=True)
        self.entries: dict[int, Entry] = {}
        self.sizes: dict[str, int] = {}  # by part: bytes read so far
        self._path: Path | None = None  # of this process's part, once there is one
        self._handle: int | None = None
        self._unsynced = False
        self.read_new()

    def read_new(self) -> set[int]:
        """Read what others have written since the last call. Returns the rows concerned."""
        rows = set()
        for _, path in sorted(self._parts().items()):
            if path == self._path:
                continue
            try:
                if self.sizes.get(path.name, -1) < path.stat().st_size:
                    rows |= self._read_part(path)
            except (FileNotFoundError, BadInput):
                if path.exists():  # else another process has finished the job and removed it
                    raise
        return rows

    def _parts(self) -> dict[int, Path]:
        try:
            paths = list(self.directory.iterdir())
        except FileNotFoundError:
            raise removed(self.directory) from None
        matches = ((path, _PART.fullmatch(path.name)) for path in paths)
        return {int(match[1]): path for path, match in matches if match is not None}

    def _read_part(self, path: Path) -> set[int]:
        rows = set()
        start = self.sizes.setdefault(path.name, 0)
        for offset, line in json_lines(path, line_bytes=_LINE_BYTES, start=start):
            if line.endswith(b"\n"):  # else it may be incomplete, and is read again
                self.sizes[path.name] = offset + len(line)
            with suppress(BadInput):  # incomplete: this row is not done
                value = _parse_line(line, path)
                check(value, self._kinds[value["good"]], where=str(path), what="a line")
                self._record(value, path, offset, len(line))
                rows.add(value["row"])
        return rows

    def _record(self, value: dict[str, Any], path: Path, offset: int, size: int) -> None:
        entry = Entry(path, offset, size, value["good"], bool(value.get("truncated")))
        previous = self.entries.get(value["row"])
        if previous is None or entry.rank > previous.rank:
            self.entries[value["row"]] = entry

    def add(self, row: int, value: dict[str, Any], *, good: bool) -> None:
        """Append one line, in one write."""
        record = {"row": row, "good": good, **value}
        line = json_line(record)
        if self._handle is None or self._path is None:
            self._handle, self._path = self._create_part()
        written = os.write(self._handle, line)
        while written < len(line):  # a nearly full disk may write only a part
            written += os.write(self._handle, line[written:])
        self._unsynced = True
        offset = self.sizes[self._path.name]
        self._record(record, self._path, offset, len(line))
        self.sizes[self._path.name] = offset + len(line)

    def _create_part(self) -> tuple[int, Path]:
        """Create this process's part, numbered last: its lines outrank those already read."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        for number in itertools.count(max(self._parts(), default=-1) + 1):
            path = self.directory / f"part-{number:06d}.jsonl"
            with suppress(FileExistsError):  # another process took this number
                handle = os.open(path, flags, 0o666)
                self.sizes[path.name] = 0
                return handle, path
        raise AssertionError("numbers do not end")

    def sync(self) -> None:
        """Flush added lines to disk, where other machines see them."""
        if self._handle is not None and self._unsynced:
            os.fsync(self._handle)
            self._unsynced = False

    def close(self) -> None:
        if self._handle is not None:
            self.sync()
            os.close(self._handle)
            self._handle = None

    def good(self) -> Iterator[tuple[int, Entry]]:
        """The rows that are done, in the order of the data."""
        return ((row, entry) for row, entry in sorted(self.entries.items()) if entry.good)

    def failed(self) -> Iterator[tuple[int, Entry]]:
        return ((row, entry) for row, entry in sorted(self.entries.items()) if not entry.good)
