"""One shard of the cache: written row by row in any order, read row by row from a memory map.

A `Layout` says where every byte is; writing and reading follow it. A shard gets its final name
only once all of its rows and their checksums are on disk. A row's checksum covers its token ids,
its loss mask and everything stored for them, so states can never be mistaken for those of other
tokens.
"""

import itertools
import json
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.rows import TokenRow
from fledge.target.cache.format import (
    KEY_BYTES,
    CacheShape,
    Field,
    raw_bytes,
    row_key,
    safetensors_header,
)

Piece = tuple[int, NDArray[Any]]  # where a file is written to, and with what


class Layout(ABC):
    """The byte layout of a file of tensors, stored end to end, and how rows are written to it."""

    def __init__(
        self, tensors: Sequence[tuple[str, torch.dtype, list[int]]], facts: dict[str, Any]
    ) -> None:
        self.header = safetensors_header(tensors, {"fledge": json.dumps(facts, sort_keys=True)})
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
        ends = [len(self.header) + end for end in itertools.accumulate(sizes, initial=0)]
        names = (name for name, _, _ in tensors)
        self.extent = dict(zip(names, itertools.pairwise(ends), strict=True))  # bytes [begin, end)
        self.n_bytes = ends[-1]

    def index(self) -> Iterator[Piece]:
        """What is written once, where the rows' places are not implied."""
        return iter(())

    @abstractmethod
    def pieces(self, row: int, tokens: TokenRow, payload: dict[str, Tensor]) -> Iterator[Piece]:
        """What is written for one row: its tokens, and the fields of its tokens and slots."""


class ShardLayout(Layout):
    """The byte layout of a shard with the given rows."""

    def __init__(
        self, shape: CacheShape, tokens: Sequence[int], slots: Sequence[int], facts: dict[str, Any]
    ) -> None:
        self.shape = shape
        self.row_start, self.slot_start = _starts_of(tokens), _starts_of(slots)
        ids, mask = Field("input_ids", torch.int32), Field("loss_mask", torch.uint8)
        key, digest = Field("row_key", torch.uint8, KEY_BYTES), Field("row_digest", torch.int64)
        parts = (
            ([*shape.token_fields(), ids, mask], self.row_start),
            (shape.slot_fields(), self.slot_start),
            ([key, digest], np.arange(len(tokens) + 1)),
        )
        # by name: the field, and the place in its tensor at which each row begins
        self._fields = {field.name: (field, at) for fields, at in parts for field in fields}
        self.payload_names = sorted(field.name for field in shape.fields())
        tensors = [
            (field.name, field.dtype, [int(at[-1]), *([field.width] if field.width else [])])
            for field, at in self._fields.values()
        ]
        tensors += [(name, torch.int64, [len(tokens) + 1]) for name in ("row_start", "slot_start")]
        # widest dtypes first: every tensor then starts at a multiple of its item size
        tensors.sort(key=lambda tensor: (-tensor[1].itemsize, tensor[0]))
        super().__init__(tensors, facts)

    def span(self, name: str, row: int) -> tuple[int, int]:
        """The byte range [begin, end) of one row in a tensor."""
        (begin, _), (field, at) = self.extent[name], self._fields[name]
        return begin + int(at[row]) * field.row_bytes, begin + int(at[row + 1]) * field.row_bytes

    def index(self) -> Iterator[Piece]:
        yield self.extent["row_start"][0], self.row_start
        yield self.extent["slot_start"][0], self.slot_start

    def pieces(self, row: int, tokens: TokenRow, payload: dict[str, Tensor]) -> Iterator[Piece]:
        ids = np.ascontiguousarray(tokens.input_ids, dtype=np.int32)
        mask = np.ascontiguousarray(tokens.loss_mask, dtype=np.uint8)
        values: dict[str, NDArray[Any]] = {"input_ids": ids, "loss_mask": mask}
        values |= {name: raw_bytes(payload[name]) for name in self.payload_names}
        values["row_digest"] = np.array([checksum(values.values())])
        values["row_key"] = np.frombuffer(row_key(ids), dtype=np.uint8)
        for name, data in values.items():
            begin, end = self.span(name, row)
            if data.nbytes != end - begin:
                raise ValueError(f"{name} of row {row} has {data.nbytes} bytes, not {end - begin}")
            yield begin, data


def layout_of(shape: CacheShape, rows: Sequence[TokenRow]) -> ShardLayout:
    """The layout of a shard with these rows, which does not depend on the target's answers."""
    slots = [len(shape.slots(row.loss_mask)) for row in rows]
    return ShardLayout(shape, [len(row.input_ids) for row in rows], slots, row_facts(rows))


def row_facts(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """What a shard's header says of its rows."""
    truncated = [bool(row.truncated) for row in rows]
    return {"places": [row.place for row in rows], "truncated": truncated}


def _starts_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def checksum(parts: Iterable[NDArray[Any]]) -> int:
    """XXH3, ten times as fast as a CRC on a CPU; as a signed integer, which is what is stored."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.data)
    return int.from_bytes(state.digest(), "big", signed=True)


class ShardWriter:
    """Fills the file of one shard; whatever is not written stays zero."""

    def __init__(self, handle: BinaryIO, layout: Layout, rows: Sequence[TokenRow]) -> None:
        self._handle, self._layout, self.rows = handle, layout, rows
        self._missing = set(range(len(rows)))
        if hasattr(os, "posix_fallocate"):  # not on macOS: a full disk fails before the target runs
            os.posix_fallocate(handle.fileno(), 0, layout.n_bytes)
        handle.truncate(layout.n_bytes)
        handle.write(layout.header)
        self._write(layout.index())

    def put(self, row: int, payload: dict[str, Tensor]) -> None:
        """Write one row with the target's answer: the payload fields of its tokens and slots."""
        self._write(self._layout.pieces(row, self.rows[row], payload))
        self._missing.discard(row)

    def finish(self) -> None:
        assert not self._missing, f"rows {sorted(self._missing)[:3]} were never written"

    def _write(self, pieces: Iterable[Piece]) -> None:
        for at, values in pieces:
            self._handle.seek(at)
            self._handle.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


@contextmanager
def open_shard(path: Path, layout: Layout, rows: Sequence[TokenRow]) -> Iterator[ShardWriter]:
    """Fill a shard. It appears when the block succeeds; nothing remains when the block fails."""
    with atomic_file(path) as handle:
        writer = ShardWriter(handle, layout, rows)
        yield writer
        writer.finish()


class Shard:
    """A finished shard, memory-mapped."""

    def __init__(self, path: Path, shape: CacheShape) -> None:
        self.path = path
        try:
            with path.open("rb") as handle:
                mapping = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            self.bytes: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
            base = 8 + int.from_bytes(mapping[:8], "little")
            header = json.loads(mapping[8:base])
            facts = json.loads(header["__metadata__"]["fledge"])
            tokens, slots = (
                self._counts(base, header[name]["data_offsets"])
                for name in ("row_start", "slot_start")
            )
            # the same rows give the same header: any difference is damage
            self.layout = ShardLayout(shape, tokens, slots, facts)
            if mapping[: len(self.layout.header)] != self.layout.header:
                raise ValueError("unexpected header")
            if self.layout.n_bytes != len(mapping):
                raise ValueError("unexpected size")
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise BadInput("the shard is cut short or damaged", where=str(path)) from error
        self.places: list[str] = facts["places"]
        self.truncated: list[bool] = facts["truncated"]
        self.lengths: NDArray[np.int64] = np.diff(self.layout.row_start)
        self.keys = self.bytes[slice(*self.layout.extent["row_key"])].reshape(-1, KEY_BYTES)

    def __len__(self) -> int:
        return len(self.places)

    def _counts(self, base: int, offsets: list[int]) -> list[int]:
        """The number of tokens or slots of each row, from the offsets at which the rows start."""
        begin, end = offsets
        starts = np.frombuffer(self.bytes[base + begin : base + end].tobytes(), dtype=np.int64)
        counts = np.diff(starts)
        if bool((counts < 0).any()):
            raise ValueError("rows overlap")
        return [int(count) for count in counts]

    def tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        return self.payload("input_ids", row).view(np.int32), self.payload("loss_mask", row)

    def payload(self, name: str, row: int) -> NDArray[np.uint8]:
        """The bytes of one row in a tensor, as a view of the memory map."""
        return self.bytes[slice(*self.layout.span(name, row))]

    def is_whole(self, row: int) -> bool:
        """Whether the row's checksum and key match its tokens and states. Reads the whole row."""
        ids, mask = self.tokens(row)
        if row_key(ids) != self.keys[row].tobytes():
            return False
        payload = (self.payload(name, row) for name in self.layout.payload_names)
        [digest] = self.payload("row_digest", row).view(np.int64)
        return checksum([ids, mask, *payload]) == int(digest)


def is_whole_shard(path: Path, layout: Layout) -> bool:
    """Whether a shard of this layout exists, by size and header; `cache verify` checks the rows."""
    if not path.is_file() or path.stat().st_size != layout.n_bytes:
        return False
    with path.open("rb") as handle:
        return handle.read(len(layout.header)) == layout.header
