"""Where rows come from: JSONL, JSON, parquet, a directory of them (local or remote, see `remote`),
or a data set id.

A source is cut into parts of whole rows that any process can read, so tokenization can run in
parallel.
"""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, first_line
from fledge.data.drops import BadRow
from fledge.data.remote import Cuts, is_address, list_files, open_binary, public_name, survey

ROWS_PER_PART = 2000
MOST_PARTS = 16  # of files that every part reads from the beginning: gzip, JSON arrays
LONGEST_LINE = 1 << 26  # bytes of a JSON line; a longer one is dropped without being decoded
_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".json", ".parquet")
# Magic bytes of files with a wrong name, and the suffix they should have.
_MAGIC = {b"\x1f\x8b": ("gzip", ".jsonl.gz"), b"PAR1": ("parquet", ".parquet")}
# a name, or a name with a split and slice: `train`, `train[:1000]`, `train[10%:20%]`
_SPLIT = re.compile(r"^(?P<id>[^\[\]]+?)(?::(?P<split>[A-Za-z_][\w.+\[\]:%-]*))?$")

# A row as read: (place, value), where the value is raw bytes of one JSON line, a decoded object,
# or the reason why there is none.
Row = tuple[str, Any]


@dataclass(frozen=True)
class Part:
    """Consecutive whole rows of one source."""

    name: str  # of the source, for messages
    path: str  # file, address, or data set id
    kind: str  # jsonl | json | parquet | dataset
    start: int  # first row (jsonl: first byte)
    stop: int  # past the last row (jsonl: past the last byte)
    first_line: int = 1
    split: str = ""

    def rows(self) -> Iterator[Row]:
        """Yield (place, row); a row that cannot be decoded is a BadRow value."""
        if self.kind == "jsonl":
            yield from self._jsonl_rows()
            return
        for index, row in enumerate(_load_objects(self), self.start):
            yield f"{self.name}:{index + 1}", row

    def _jsonl_rows(self) -> Iterator[Row]:
        offset, number = self.start, self.first_line
        with open_binary(self.path) as file:
            for line, size in _lines(file, self.path, offset, number):
                if line is None or line.strip():
                    yield f"{self.name}:{number}", decode_line(line)
                offset, number = offset + size, number + 1
                if offset >= self.stop:
                    return
        raise BadInput("the file became shorter while it was read", where=self.name)


def decode_line(line: bytes | None) -> Any:
    """The value of a JSON line (None: a line that is too long), or a BadRow with the fault."""
    if line is None:
        return BadRow("row is too long", f"more than {LONGEST_LINE:,} bytes")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow("broken UTF-8", f"byte {error.start}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow("broken or truncated JSON", str(error)[:60])


def _lines(
    file: io.BufferedReader, path: str, offset: int = 0, number: int = 1
) -> Iterator[tuple[bytes | None, int]]:
    """The lines of an open file, plain or gzip, from an offset on, each with its size. An overlong
    one is None, and not kept in memory. Damage is reported as one BadInput."""
    name = public_name(path)
    zipped = name.endswith(".gz")
    first_bytes = file.peek(4)[:4] if number == 1 else b""  # only the first part has the beginning
    for magic, (what, suffix) in _MAGIC.items():
        if first_bytes.startswith(magic) and not (zipped and what == "gzip"):
            raise BadInput(f"is a {what} file", where=name, fix=f"name it {suffix}")
    handle: Any = gzip.GzipFile(fileobj=file) if zipped else file
    try:
        if offset:  # not at 0: a server may not support seeking
            handle.seek(offset)
        while line := handle.readline(LONGEST_LINE):
            size = len(line)
            whole = line.endswith(b"\n") or size < LONGEST_LINE
            more = b"" if whole else line
            while more and not more.endswith(b"\n"):
                more = handle.readline(1 << 20)
                size += len(more)
            yield (line if whole else None), size
            number += 1
    except (EOFError, zlib.error, OSError) as error:
        raise BadInput(
            f"truncated or damaged ({first_line(error)[:80]})",
            where=f"{name}:{number}",
            fix="fetch or write it again",
        ) from None


def _load_objects(part: Part) -> list[Any]:
    if part.kind == "parquet":
        return _load_parquet(part)
    if part.kind == "dataset":
        rows = _load_dataset(part.path, part.split).select(range(part.start, part.stop))
        with _arrow_errors(part.name, "data set"):
            return list(rows)
    return list(_load_json(part.path)[part.start : part.stop])


@contextlib.contextmanager
def _arrow_errors(where: str, what: str) -> Iterator[None]:
    """Turn Arrow's errors about unreadable bytes into one BadInput. (They are ValueErrors,
    OSErrors, KeyErrors, NotImplementedErrors or plain ArrowExceptions.)"""
    import pyarrow as pa

    try:
        yield
    except BadInput:
        raise
    except (pa.ArrowException, ValueError, OSError, LookupError, TypeError, OverflowError) as error:
        line = first_line(error)[:120]
        raise BadInput(f"not a {what}, or a damaged one ({line})", where=where) from None


def _load_parquet(part: Part) -> list[Any]:
    """Read only the row groups that contain the part, not the whole file for every part."""
    with _parquet_file(part.path) as file:
        sizes = _group_sizes(file.metadata, part.name)
        begins = [0, *itertools.accumulate(sizes)]
        groups = range(len(sizes))
        wanted = [g for g in groups if begins[g] < part.stop and begins[g + 1] > part.start]
        table: Any = file.read_row_groups(wanted)
        first = part.start - begins[wanted[0]]
        rows = list(table.slice(first, part.stop - part.start).to_pylist())
    if len(rows) != part.stop - part.start:
        raise BadInput("a damaged parquet file: rows are missing", where=part.name)
    return rows


@contextlib.contextmanager
def _parquet_file(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with _arrow_errors(public_name(path), "parquet file"):
        if is_address(path):
            with open_binary(path) as file, pq.ParquetFile(file) as parquet:
                yield parquet
        else:  # Arrow reads local files itself
            with pq.ParquetFile(path) as parquet:
                yield parquet


def _group_sizes(metadata: Any, path: str) -> list[int]:
    """Rows in each group; the file's total must agree, which detects flipped bits in either."""
    groups = range(metadata.num_row_groups)
    sizes = [int(metadata.row_group(group).num_rows) for group in groups]
    if any(size < 0 for size in sizes) or sum(sizes) != metadata.num_rows:
        raise BadInput("a damaged parquet file: its row counts disagree", where=path)
    return sizes


def _load_json(path: str) -> list[Any]:
    name = public_name(path)
    try:
        with open_binary(path) as file:
            value = json.load(file)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"not valid JSON ({str(error)[:80]})",
            where=name,
            fix="one object per line? name it .jsonl",
        ) from None
    if isinstance(value, dict):  # {"data": [...]} and the like
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 and "messages" not in value else [value]
    if not isinstance(value, list):
        raise BadInput("not a list of rows", where=name, fix="expected [{...}, ...]")
    return value


def _load_dataset(name: str, split: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, DatasetsError) as error:  # of the hub, or about splits
        raise BadInput(
            f"cannot load the data set {name!r} ({str(error)[:120]})",
            fix="give a local .jsonl, .json or .parquet file, or check the name and the network",
        ) from None


def expand(sources: list[str]) -> list[tuple[str, str, str]]:
    """Resolve the user's sources to (kind, path or id, split), and directories to their files."""
    resolved: list[tuple[str, str, str]] = []
    for source in sources:
        path = Path(source).expanduser()
        if is_address(source):
            resolved += [(_kind(file), file, "") for file in list_files(source, _SUFFIXES)]
        elif path.is_dir():
            named = (p for p in path.rglob("*") if p.name.endswith(_SUFFIXES))
            files = sorted(p for p in named if not p.is_dir())
            if not files:
                raise BadInput(f"no {', '.join(_SUFFIXES)} file", where=source)
            resolved += [(_regular(file), str(file), "") for file in files]
        elif path.exists():
            resolved.append((_regular(path), str(path), ""))
        elif source.endswith(_SUFFIXES) or source.startswith((".", "/", "~")):
            raise BadInput("no such file", where=source)
        else:
            match = _SPLIT.match(source)
            if match is None:
                raise BadInput("not a file, a directory or a data set id", where=source)
            resolved.append(("dataset", match["id"], match["split"] or ""))
    if not resolved:
        raise BadInput("no data was named", fix="give at least one file, directory or data set id")
    return resolved


def _regular(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe may block, and a device may never end
        raise BadInput(
            "not a regular file", where=str(path), fix="data is read twice: write it to a file"
        )
    return _kind(str(path))


def _kind(path: str) -> str:
    name = public_name(path)
    if name.endswith((".jsonl", ".ndjson", ".jsonl.gz")):
        return "jsonl"
    if name.endswith((".json", ".parquet")):
        return name.rpartition(".")[2]
    raise BadInput("unknown kind of file", where=name, fix=f"known: {', '.join(_SUFFIXES)}")


def make_parts(sources: list[str], rows_per_part: int = ROWS_PER_PART) -> list[Part]:
    """Cut all sources into parts, in order."""
    parts: list[Part] = []
    for kind, path, split in expand(sources):
        name = public_name(path) if kind != "dataset" else f"{path}:{split or 'train'}"
        if kind == "jsonl":
            cuts = _cuts(path, rows_per_part)
            cut = [Part(name, path, kind, start, stop, first) for start, stop, first in cuts]
        else:
            total = _count(kind, path, split)
            cut = [
                Part(name, path, kind, start, min(total, start + rows_per_part), split=split)
                for start in range(0, total, rows_per_part)
            ]
        if kind == "json" or name.endswith(".gz"):  # the same rows in at most MOST_PARTS parts
            size = max(1, -(-len(cut) // MOST_PARTS))
            groups = [cut[i : i + size] for i in range(0, len(cut), size)]
            cut = [replace(group[0], stop=group[-1].stop) for group in groups]
        parts += cut
    return parts


def _cuts(path: str, rows_per_part: int) -> Cuts:
    """Where a file of lines is cut."""
    if is_address(path):
        return _survey("jsonl", path, rows_per_part)[1]
    with open_binary(path) as file:
        return _cut(file, path, rows_per_part)


def _cut(file: io.BufferedReader, path: str, rows_per_part: int) -> Cuts:
    sizes = (size for _, size in _lines(file, path))
    cuts: Cuts = []
    stop, line = 0, 1
    while group := list(itertools.islice(sizes, rows_per_part)):
        start, stop = stop, stop + sum(group)
        cuts.append((start, stop, line))
        line += len(group)
    return cuts


def _survey(kind: str, path: str, rows_per_part: int) -> tuple[str, Cuts]:
    if kind == "jsonl":
        return survey(path, lambda f: _cut(f, path, rows_per_part), f"lines by {rows_per_part}")
    return survey(path, lambda _: [], "whole")


def _count(kind: str, path: str, split: str) -> int:
    if kind == "parquet":
        with _parquet_file(path) as file:
            return sum(_group_sizes(file.metadata, public_name(path)))
    if kind == "dataset":
        return len(_load_dataset(path, split))
    return len(_load_json(path))


def fingerprint(sources: list[str], rows_per_part: int = ROWS_PER_PART) -> str:
    """A digest of the rows' bytes: equal data has equal fingerprints, wherever it is stored. Remote
    files are read once for this and for `make_parts` with the same `rows_per_part`."""
    digest = hashlib.sha256()
    for kind, path, split in expand(sources):
        digest.update(kind.encode())
        if kind == "dataset":
            digest.update(f"{path}:{split}:{_load_dataset(path, split)._fingerprint}".encode())
        elif is_address(path):
            digest.update(bytes.fromhex(_survey(kind, path, rows_per_part)[0]))
        else:
            with Path(path).open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
