"""What a long job has done so far: JSON lines that are only appended to, one for each row.

`fledge regenerate` and the answers of `fledge eval` resume from them. A line that a killed process
was writing is not JSON, and its row counts as not done.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def json_line(value: Any) -> bytes:
    """One line of readable JSON; lone surrogates are kept as escapes."""
    try:
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value) + "\n").encode()


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record. Closing the file shows it to other machines."""
    with path.open("ab+") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")  # ends the line of a killed process
        file.write(json_line(record))


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset in the file, record) of each whole line; nothing if there is no file yet."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        offset = 0
        for line in file:
            with suppress(ValueError):
                yield offset, json.loads(line)
            offset += len(line)
