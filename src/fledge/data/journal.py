"""What a long job has done so far: JSON lines that are only appended to, one for each row.

`fledge regenerate` and the answers of `fledge eval` resume from them. A line that a killed process
was writing is not JSON, and its row counts as not done; so does one of another kind of job.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.files import removed
from fledge.core.reading import Expected, Flag, Table, Whole, check, json_lines, parse_json

_LINE = Table({"row": Whole(), "good": Flag()}, optional={"truncated": Flag()})


def json_line(value: Any) -> bytes:
    """One line of readable JSON; lone surrogates are kept as escapes."""
    try:
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value) + "\n").encode()


def append(path: Path, row: int, value: dict[str, Any], *, good: bool) -> None:
    """Add the line of a row. Closing the file shows it to other machines."""
    try:
        file = path.open("ab+")
    except FileNotFoundError:
        raise removed(path.parent) from None
    with file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")  # ends the line of a killed process
        file.write(json_line({"row": row, "good": good, **value}))


def read(
    path: Path, kinds: Mapping[bool, Expected], *, start: int = 0
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (offset of the line, where to start next time, record) of each valid line from `start`.
    `kinds` describes the records of good rows (True) and of failed ones."""
    what, where = "a line of the journal", str(path)
    try:
        for offset, line in json_lines(path, start=start):
            if line.endswith(b"\n"):  # else it may be incomplete, and is read again
                start = offset + len(line)
            with suppress(BadInput):
                record = parse_json(line, _LINE, where=where, what=what)
                check(record, kinds[record["good"]], where=where, what=what)
                yield offset, start, record
    except BadInput:
        if path.exists():  # else nothing is done yet, or the job is finished and its parts removed
            raise
