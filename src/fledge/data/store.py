"""Token rows on disk: memory-mapped Arrow files, one per part, and the view over them.

A part is `part-00007.arrow` with the rows and `part-00007.json`, written last, with the checksum
and the drop report. A part whose record is missing or does not match is rebuilt.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fledge.core.errors import BadInput, first_line
from fledge.core.files import atomic_file, write_json
from fledge.core.reading import ListOf, MapOf, Table, Text, Whole, open_file, read_json
from fledge.core.rows import TokenRow
from fledge.data.drops import DropReport
from fledge.data.rows import Block
from fledge.data.tokenise import TokenisedPart, checksum

# Bytes of parts that stay mapped: once read, their pages count as memory of this process.
_MAPPED_BYTES = 1 << 29
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("place", pa.string()),
        ("truncated", pa.bool_()),
    ]
)

_COUNTS, _PLACES = MapOf(Whole()), MapOf(ListOf(Text(), least=1))
_DROPS = Table(
    {
        "kept": Whole(),
        **dict.fromkeys(("counts", "notes"), _COUNTS),
        **dict.fromkeys(("examples", "noted"), _PLACES),
    }
)
_FIGURES = dict.fromkeys(("crc32", "rows", "tokens", "supervised"), Whole())
_RECORD = Table({**_FIGURES, "drops": _DROPS})


def part_path(directory: Path, index: int) -> Path:
    return directory / f"part-{index:05d}.arrow"


def write_part(directory: Path, index: int, part: TokenisedPart) -> None:
    """Write the rows, then the record that makes the part valid."""
    path = part_path(directory, index)
    columns = [[getattr(row, name) for row in part.rows] for name in _SCHEMA.names]
    batch = pa.record_batch(columns, schema=_SCHEMA)
    with atomic_file(path) as handle, pa.ipc.new_file(handle, _SCHEMA) as writer:
        writer.write_batch(batch)
    record = {
        "crc32": checksum(path),
        "rows": len(part.rows),
        "tokens": sum(len(row.input_ids) for row in part.rows),
        "supervised": sum(int(row.loss_mask.sum()) for row in part.rows),
        "drops": part.drops.to_json(),
    }
    write_json(path.with_suffix(".json"), record)


def read_record(directory: Path, index: int) -> dict[str, Any] | None:
    """The record of a finished, undamaged part, else None."""
    path = part_path(directory, index)
    try:
        record: dict[str, Any] = read_json(path.with_suffix(".json"), _RECORD)
        block = _map_part(path) if record["crc32"] == checksum(path) else None
    except BadInput:
        return None
    return record if block is not None and len(block.offsets) == record["rows"] + 1 else None


class TokenRows(Sequence[TokenRow]):
    """All rows of a prepared data set, memory-mapped; rows are returned as views. Only the lengths
    of all rows are kept in memory; parts are mapped on access, and the latest ones stay mapped."""

    def __init__(self, directory: Path, parts: int, drops: DropReport, fingerprint: str) -> None:
        self.directory, self.drops, self.fingerprint = directory, drops, fingerprint
        self._parts = parts
        size = sum(_size(part_path(directory, part)) for part in range(parts))
        self._block = lru_cache(maxsize=_MAPPED_BYTES * parts // max(1, size))(self._map)
        self._first = np.zeros(1, dtype=np.int64)  # first row of each part
        self.lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        lengths = [np.diff(block.offsets) for block in self.blocks()]
        self._first = np.cumsum([0, *map(len, lengths)])
        self.lengths = np.concatenate([self.lengths, *lengths])

    def _map(self, part: int) -> Block:
        path = part_path(self.directory, part)
        if not len(self.lengths):  # called from __init__, which reads the lengths
            return _map_part(path)
        rows = slice(self._first[part], self._first[part + 1])
        return _map_part(path, known=self.lengths[rows])

    def blocks(self) -> Iterator[Block]:
        """The rows, part by part."""
        return map(self._block, range(self._parts))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        block, local = self._block(part), int(index - self._first[part])
        start, end = int(block.offsets[local]), int(block.offsets[local + 1])
        return TokenRow(
            block.ids[start:end],
            block.mask[start:end],
            block.places[local].as_py(),
            block.truncated[local].as_py(),
        )

    def flat(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """All tokens and their mask, one part at a time, not split into rows."""
        for block in self.blocks():
            yield block.ids, block.mask

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def supervised(self) -> int:
        return sum(int(mask.sum()) for _, mask in self.flat())

    @property
    def truncated(self) -> int:
        """Rows whose last answer is missing its end."""
        return sum(int(block.truncated.true_count) for block in self.blocks())

    def check_mask(self) -> None:
        """Refuse an all-zero or all-one mask: the template was misread."""
        supervised = self.supervised
        if supervised in (0, self.tokens):
            raise BadInput(
                f"the loss mask is {'empty' if supervised == 0 else 'full'}: "
                f"{supervised} of {self.tokens} tokens are supervised",
                fix="look at the rows with `fledge data preview`, and check the chat template",
            )


def _size(path: Path) -> int:
    with open_file(path, what="a part of the rows") as handle:
        return os.fstat(handle.fileno()).st_size


def _map_part(path: Path, known: NDArray[np.int64] | None = None) -> Block:
    """Map a part, and check that its offsets stay within the tokens: a view beyond them would read
    arbitrary memory. A part whose lengths are `known` was fully checked before, and must still have
    these lengths."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        table.validate(full=known is None)
    except (OSError, ValueError, pa.ArrowException) as error:  # none of them names the file
        what = f"cannot be read ({first_line(error)})"
        raise BadInput(what, where=str(path), fix="run again") from None
    if table.schema != _SCHEMA or any(column.null_count for column in table.columns):
        raise BadInput("not rows of tokens", where=str(path), fix="run again")
    ids, mask = table.column("input_ids"), table.column("loss_mask")
    offsets = ids.offsets.to_numpy().astype(np.int64)
    values = [column.values.to_numpy(zero_copy_only=True) for column in (ids, mask)]
    if not np.array_equal(offsets, mask.offsets.to_numpy()):
        raise BadInput("tokens and mask do not match", where=str(path), fix="run again")
    if known is not None and not np.array_equal(np.diff(offsets), known):
        raise BadInput("changed while it was in use", where=str(path), fix="run again")
    places, truncated = table.column("place"), table.column("truncated")
    return Block(values[0], values[1], offsets, places, truncated)
