"""What a long job has done so far, on disk: append-only parts, one line per row, one part per
process. `fledge regenerate` and the answers of `fledge eval` continue from it.

A process never touches the part of another one: it reads them all and begins its own. A line that
a killed process was writing is not whole JSON, and its row counts as not done. A row that failed
may be tried again; of several lines about a row, a good one wins.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATTERN = "part-*.jsonl"


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
            value: dict[str, Any] = json.loads(handle.read(self.size))
        return value


class Journal:
    """The parts of one job; for one process at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        parts = sorted(directory.glob(_PATTERN))
        self.entries: dict[int, Entry] = {}
        for path in parts:
            self._read(path)
        number = int(parts[-1].stem.partition("-")[2]) + 1 if parts else 0
        self._path = directory / f"part-{number:06d}.jsonl"
        self._handle: int | None = None
        self._size = 0

    def _read(self, path: Path) -> None:
        offset = 0
        with path.open("rb") as handle:
            for line in handle:
                with suppress(ValueError, KeyError, TypeError):  # cut short: this row is not done
                    self._note(json.loads(line), path, offset, len(line))
                offset += len(line)

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
