"""One shard of the cache: written row by row in any order, read row by row from a memory map.

A shard gets its final name only once all of its rows and their checksums are on disk. A row's
checksum covers its token ids, its loss mask and everything stored for them, so states can never be
mistaken for those of other tokens.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.reading import Flag, ListOf, Row, Table, Text, Whole, open_regular, parse_json
from fledge.core.rows import TokenRow
from fledge.target.cache.format import (
    KEY_BYTES,
    CacheShape,
    Layout,
    Piece,
    ShardLayout,
    row_key,
)


class ShardWriter:
    """Fills the file of one shard; whatever is not written stays zero."""

    def __init__(self, handle: BinaryIO, layout: Layout, rows: Sequence[TokenRow]) -> None:
        self._handle, self._layout, self.rows = handle, layout, rows
        self._digests = np.zeros(len(rows), dtype=np.int64)
        self._written = np.zeros(len(rows), dtype=np.bool_)
        if hasattr(os, "posix_fallocate"):  # not on macOS: a full disk fails before the target runs
            os.posix_fallocate(handle.fileno(), 0, layout.n_bytes)
        handle.truncate(layout.n_bytes)
        handle.write(layout.header)
        self._write(layout.before(rows))

    def put(self, row: int, payload: dict[str, Tensor]) -> None:
        """Write the target's answer for one row: the payload fields of its tokens and slots."""
        tokens = self.rows[row]
        ids = np.ascontiguousarray(tokens.input_ids, dtype=np.int32)
        mask = np.ascontiguousarray(tokens.loss_mask, dtype=np.uint8)
        written = self._write(self._layout.pieces(row, tokens, payload))
        self._digests[row] = _checksum([ids.data, mask.data, *written])
        self._written[row] = True

    def finish(self) -> None:
        missing = np.flatnonzero(~self._written)
        assert not len(missing), f"rows {missing[:3]} of the shard were never written"
        self._write(self._layout.after(self._digests))

    def _write(self, pieces: Iterator[Piece]) -> list[memoryview]:
        written = []
        for at, values in pieces:
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            self._handle.seek(at)
            self._handle.write(data)
            written.append(data)
        return written


@contextmanager
def open_shard(path: Path, layout: Layout, rows: Sequence[TokenRow]) -> Iterator[ShardWriter]:
    """Fill a shard. It appears when the block succeeds; nothing remains when the block fails."""
    with atomic_file(path) as handle:
        writer = ShardWriter(handle, layout, rows)
        yield writer
        writer.finish()


_MAX_HEADER_BYTES = 64 << 20  # a row takes about 100 bytes, and a shard has 256 by default
# What the header of a shard must contain before its layout can be built and compared.
_STARTS = Table({"data_offsets": Row((Whole(), Whole()))})
_HEADER = Table(
    {"__metadata__": Table({"fledge": Text(2**30)}), "row_start": _STARTS, "slot_start": _STARTS}
)
_FACTS = Table({"places": ListOf(Text(), most=2**48), "truncated": ListOf(Flag(), most=2**48)})


def mapped(path: Path) -> mmap.mmap:
    """A memory map of a shard, whose pages are loaded as they are read."""
    with open_regular(path, inside=path.parent) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size < 8:  # an empty file cannot be mapped
            raise _damaged(path)
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


def _read_header(mapping: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the safetensors header, our own metadata in it)."""
    length = int.from_bytes(mapping[:8], "little")
    if length > min(len(mapping) - 8, _MAX_HEADER_BYTES):
        raise _damaged(path)
    where, what = str(path), "the shard"
    header: dict[str, Any] = parse_json(mapping[8 : 8 + length], _HEADER, where=where, what=what)
    facts_json = header["__metadata__"]["fledge"]
    return header, parse_json(facts_json, _FACTS, where=where, what=what)


def _damaged(path: Path) -> BadInput:
    return BadInput("the shard is cut short or damaged", where=str(path))


class Shard:
    """A finished shard, memory-mapped."""

    def __init__(self, path: Path, shape: CacheShape, vocab_size: int = 2**31) -> None:
        self.path, self._vocab_size = path, vocab_size
        self._map = mapped(path)
        header, facts = _read_header(self._map, path)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        tokens, slots = (self._counts(header, name) for name in ("row_start", "slot_start"))
        whole = len(tokens) == len(slots) == len(facts["places"]) == len(facts["truncated"])
        if whole:
            self.layout = ShardLayout(shape, tokens, slots, facts)
            whole = self.layout.n_bytes == len(self._map)
            whole = whole and self._map[: len(self.layout.header)] == self.layout.header
        if not whole:
            raise _damaged(path)
        self.lengths: NDArray[np.int64] = np.diff(self.layout.row_start)
        self.places: list[str] = facts["places"]
        self.truncated: list[bool] = facts["truncated"]
        self.input_ids = self._view("input_ids", np.int32)
        self.loss_mask = self._view("loss_mask", np.uint8)
        self.keys = self._view("row_key", np.uint8).reshape(-1, KEY_BYTES)
        self._digests = self._view("row_digest", np.int64)

    def __len__(self) -> int:
        return len(self.places)

    def _counts(self, header: dict[str, Any], name: str) -> list[int]:
        """The number of tokens or slots of each row, from the offsets at which the rows start."""
        base = 8 + int.from_bytes(self._map[:8], "little")
        begin, end = header[name]["data_offsets"]
        if not begin < end <= len(self._map) - base or (end - begin) % 8:
            raise _damaged(self.path)
        starts = np.frombuffer(self._map[base + begin : base + end], dtype=np.int64)
        counts = np.diff(starts)
        if starts[0] != 0 or starts[-1] > len(self._map) or (starts[1:] < starts[:-1]).any():
            raise _damaged(self.path)
        return [int(count) for count in counts]

    def _view(self, name: str, dtype: Any) -> NDArray[Any]:
        return self.bytes[slice(*self.layout.extent[name])].view(dtype)

    def tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        span = slice(int(self.layout.row_start[row]), int(self.layout.row_start[row + 1]))
        return self.input_ids[span], self.loss_mask[span]

    def payload(self, name: str, row: int) -> NDArray[np.uint8]:
        """The bytes of one row in a payload tensor, as a view of the memory map."""
        begin, end = self.layout.span(name, row)
        return self.bytes[begin:end]

    def is_whole(self, row: int) -> bool:
        """Whether the row's checksum and key match its tokens and states and every id is within its
        vocabulary. Reads the whole row."""
        ids, mask = self.tokens(row)
        if not _within(ids, self._vocab_size):
            return False
        if (shape := self.layout.shape).encoding == "topk":
            top_ids = self.payload("topk_ids", row).view(np.int32)
            if not _within(top_ids, shape.draft_vocab_size):
                return False
        slots = int(self.layout.slot_start[row + 1] - self.layout.slot_start[row])
        if row_key(ids) != self.keys[row].tobytes() or len(self.layout.shape.slots(mask)) != slots:
            return False
        payload = (self.payload(name, row).data for name in self.layout.payload_names)
        return _checksum([ids.data, mask.data, *payload]) == int(self._digests[row])

    def read_ahead(self, row: int) -> None:
        """Have the operating system fetch a row in the background."""
        for name in self.layout.payload_names:
            begin, end = self.layout.span(name, row)
            begin -= begin % mmap.PAGESIZE
            if end > begin:
                self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)


def is_whole_shard(path: Path, layout: Layout) -> bool:
    """Whether a shard of this layout exists, by size and header; `cache verify` checks the rows."""
    try:
        with open_regular(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            return size == layout.n_bytes and handle.read(len(layout.header)) == layout.header
    except BadInput:
        return False


def _within(ids: NDArray[np.int32], size: int) -> bool:
    return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < size)


def _checksum(parts: Sequence[memoryview]) -> int:
    """XXH3, ten times as fast as a CRC on a CPU; as a signed integer, which is what is stored."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "big", signed=True)
