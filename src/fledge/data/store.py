"""Token rows on disk: memory-mapped Arrow files, one per part, and the view over them.

A part is `part-00007.arrow` with the rows and `part-00007.json`, written last, with the checksum
and the drop report. A part whose record is missing or does not match is rebuilt.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fledge.core.errors import BadInput, first_line
from fledge.core.files import atomic_file, write_json
from fledge.core.reading import read_json
from fledge.core.rows import TokenRow
from fledge.data.drops import DropReport
from fledge.data.rows import Block
from fledge.data.tokenise import TokenisedPart, checksum

_MAPPED = 64  # parts that stay mapped: each has an open file
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("place", pa.string()),
        ("truncated", pa.bool_()),
    ]
)


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
        record: dict[str, Any] = read_json(path.with_suffix(".json"))
        if record["crc32"] == checksum(path):
            return record
    except (BadInput, OSError, KeyError):
        pass
    return None


class TokenRows(Sequence[TokenRow]):
    """All rows of a prepared data set, memory-mapped; rows are returned as views. Only the lengths
    of all rows are kept in memory; parts are mapped on access, and the latest ones stay mapped."""

    def __init__(self, directory: Path, parts: int, drops: DropReport, fingerprint: str) -> None:
        self.directory, self.drops, self.fingerprint = directory, drops, fingerprint
        self._parts = parts
        self._block = lru_cache(maxsize=_MAPPED)(self._map)
        lengths = [np.diff(block.offsets) for block in self.blocks()]
        self._first = np.cumsum([0, *map(len, lengths)])  # first row of each part
        self.lengths: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *lengths])

    def _map(self, part: int) -> Block:
        return _map_part(part_path(self.directory, part))

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


def _map_part(path: Path) -> Block:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    except (OSError, ValueError, pa.ArrowException) as error:  # none of them names the file
        what = f"cannot be read ({first_line(error)})"
        raise BadInput(what, where=str(path), fix="run again") from None
    ids, mask = table.column("input_ids"), table.column("loss_mask")
    return Block(
        ids.values.to_numpy(),
        mask.values.to_numpy(),
        ids.offsets.to_numpy().astype(np.int64),
        table.column("place"),
        table.column("truncated"),
    )
