"""Where rows come from: JSONL, JSON, parquet, a directory of them (local or remote, see `remote`),
or a data set id.

A source is cut into parts of whole rows that any process can read, so tokenization can run in
parallel.
"""

import contextlib
import gzip
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, first_line
from fledge.data.drops import BadRow
from fledge.data.remote import is_address, list_files, local_copy, public_name

ROWS_PER_PART = 2000
MOST_PARTS = 16  # of files that every part reads from the beginning: gzip, JSON arrays
_LINES = (".jsonl", ".ndjson", ".jsonl.gz")
_SUFFIXES = (*_LINES, ".json", ".parquet")
# a name, or a name with a split and slice: `train`, `train[:1000]`, `train[10%:20%]`
_SPLIT = re.compile(r"^(?P<id>[^\[\]]+?)(?::(?P<split>[A-Za-z_][\w.+\[\]:%-]*))?$")

# A row as read: (place, value), where the value is the decoded object, or the reason why there is
# none.
Row = tuple[str, Any]


@dataclass(frozen=True)
class Source:
    """One file, or one split of a data set."""

    kind: str  # jsonl | json | parquet | dataset
    path: str  # local file, or data set id
    name: str  # for messages
    split: str = ""


@dataclass(frozen=True)
class Part:
    """Consecutive whole rows of one source."""

    source: Source
    start: int  # first row (jsonl: first byte)
    stop: int  # past the last row (jsonl: past the last byte)
    first_line: int = 1

    def rows(self) -> Iterator[Row]:
        """Yield (place, row); a row that cannot be decoded is a BadRow value."""
        if self.source.kind == "jsonl":
            yield from self._jsonl_rows()
            return
        for index, row in enumerate(_load_objects(self), self.start):
            yield f"{self.source.name}:{index + 1}", row

    def _jsonl_rows(self) -> Iterator[Row]:
        offset, number = self.start, self.first_line
        for line in _lines(self.source, offset, number):
            if line.strip():
                yield f"{self.source.name}:{number}", decode_line(line)
            offset, number = offset + len(line), number + 1
            if offset >= self.stop:
                return


def decode_line(line: bytes) -> Any:
    """The value of a JSON line, or a BadRow with the fault."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow("broken UTF-8", f"byte {error.start}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow("broken or truncated JSON", str(error)[:60])


def _lines(source: Source, offset: int = 0, number: int = 1) -> Iterator[bytes]:
    """The lines of a file, plain or gzip, from an offset on. Damage is reported as a BadInput."""
    opened: Any = gzip.open if source.path.endswith(".gz") else open
    try:
        with opened(source.path, "rb") as file:
            file.seek(offset)
            for line in file:
                yield line
                number += 1
    except (EOFError, zlib.error, OSError) as error:
        raise BadInput(
            f"truncated or damaged ({first_line(error)[:80]})",
            where=f"{source.name}:{number}",
            fix="fetch or write it again",
        ) from None


def _load_objects(part: Part) -> list[Any]:
    source = part.source
    if source.kind == "parquet":
        return _load_parquet(part)
    if source.kind == "dataset":
        with _arrow_errors(source.name, "data set"):
            return list(_load_dataset(source).select(range(part.start, part.stop)))
    return list(_load_json(source)[part.start : part.stop])


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
    with _parquet_file(part.source) as file:
        begins = [0, *itertools.accumulate(_group_sizes(file))]
        groups = range(len(begins) - 1)
        wanted = [g for g in groups if begins[g] < part.stop and begins[g + 1] > part.start]
        first = part.start - begins[wanted[0]]
        table: Any = file.read_row_groups(wanted)
        return list(table.slice(first, part.stop - part.start).to_pylist())


@contextlib.contextmanager
def _parquet_file(source: Source) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with _arrow_errors(source.name, "parquet file"), pq.ParquetFile(source.path) as file:
        yield file


def _group_sizes(file: Any) -> list[int]:
    groups = range(file.metadata.num_row_groups)
    return [int(file.metadata.row_group(group).num_rows) for group in groups]


def _load_json(source: Source) -> list[Any]:
    try:
        value = json.loads(Path(source.path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"not valid JSON ({str(error)[:80]})",
            where=source.name,
            fix="one object per line? name it .jsonl",
        ) from None
    if isinstance(value, dict):  # {"data": [...]} and the like
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 and "messages" not in value else [value]
    if not isinstance(value, list):
        raise BadInput("not a list of rows", where=source.name, fix="expected [{...}, ...]")
    return value


def _load_dataset(source: Source) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(source.path, split=source.split or "train")
    except (OSError, ValueError, DatasetsError) as error:  # of the hub, or about splits
        raise BadInput(
            f"cannot load the data set {source.path!r} ({str(error)[:120]})",
            fix="give a local .jsonl, .json or .parquet file, or check the name and the network",
        ) from None


def expand(sources: list[str]) -> list[Source]:
    """Resolve the user's sources, and directories to their files."""
    resolved: list[Source] = []
    for source in sources:
        path = Path(source).expanduser()
        if is_address(source):
            files = list_files(source, _SUFFIXES)
            resolved += [_file(local_copy(file), public_name(file)) for file in files]
        elif path.is_dir():
            files = sorted(str(p) for p in path.rglob("*") if p.is_file())
            files = [file for file in files if file.endswith(_SUFFIXES)]
            resolved += [_file(file, file) for file in files]
        elif path.exists():
            files = [str(path)]
            resolved.append(_file(str(path), str(path)))
        elif source.endswith(_SUFFIXES) or source.startswith((".", "/", "~")):
            raise BadInput("no such file", where=source)
        else:
            match = _SPLIT.match(source)
            if match is None:
                raise BadInput("not a file, a directory or a data set id", where=source)
            files, split = [source], match["split"] or ""
            name = f"{match['id']}:{split or 'train'}"
            resolved.append(Source("dataset", match["id"], name, split))
        if not files:
            raise BadInput(f"no {', '.join(_SUFFIXES)} file", where=public_name(source))
    if not resolved:
        raise BadInput("no data was named", fix="give at least one file, directory or data set id")
    return resolved


def _file(path: str, name: str) -> Source:
    if path.endswith(_LINES):
        return Source("jsonl", path, name)
    if path.endswith(_SUFFIXES):
        return Source(path.rpartition(".")[2], path, name)
    raise BadInput("unknown kind of file", where=name, fix=f"known: {', '.join(_SUFFIXES)}")


def make_parts(sources: list[str], rows_per_part: int = ROWS_PER_PART) -> list[Part]:
    """Cut all sources into parts, in order."""
    parts: list[Part] = []
    for source in expand(sources):
        if source.kind == "jsonl":
            cut = list(_cut_lines(source, rows_per_part))
        else:
            total = _count(source)
            starts = range(0, total, rows_per_part)
            cut = [Part(source, start, min(total, start + rows_per_part)) for start in starts]
        if source.path.endswith((".json", ".gz")):  # the same rows in at most MOST_PARTS parts
            size = max(1, -(-len(cut) // MOST_PARTS))
            groups = [cut[i : i + size] for i in range(0, len(cut), size)]
            cut = [replace(group[0], stop=group[-1].stop) for group in groups]
        parts += cut
    return parts


def _cut_lines(source: Source, rows_per_part: int) -> Iterator[Part]:
    sizes = map(len, _lines(source))
    stop, line = 0, 1
    while group := list(itertools.islice(sizes, rows_per_part)):
        start, stop = stop, stop + sum(group)
        yield Part(source, start, stop, line)
        line += len(group)


def _count(source: Source) -> int:
    if source.kind == "parquet":
        with _parquet_file(source) as file:
            return sum(_group_sizes(file))
    return len(_load_dataset(source) if source.kind == "dataset" else _load_json(source))


def fingerprint(sources: list[str]) -> str:
    """A digest of the rows' bytes: equal data has equal fingerprints, wherever it is stored."""
    digest = hashlib.sha256()
    for source in expand(sources):
        digest.update(source.kind.encode())
        if source.kind == "dataset":
            known = f"{source.path}:{source.split}:{_load_dataset(source)._fingerprint}"
            digest.update(known.encode())
        else:
            with Path(source.path).open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
