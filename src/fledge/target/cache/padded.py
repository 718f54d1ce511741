"""A shard in AutoModel's own layout: rows padded to one length, every field stacked.

Rows are stored the way a trainer reads them: shifted (`core.batch`). Example: a row of four tokens
with prompt `x0 x1`, padded to six:

    token                    x0   x1   x2   x3
    input_ids [R, S]         x1   x2   x3   0    0    0     int64
    attention_mask [R, S]    1    1    1    1    0    0     int64
    loss_mask [R, S]         0    1    1    0    0    0     int64, of the token after
    aux_hidden_states        a0   a1   a2   a3   0    0     [R, S, 3D]
    target_probs             .    p2   p3   .    .    .     [R, S, W], about the token after
    position_mask            .    m2   m3   .    .    .     [R, S, 1], bool

or, instead of `target_probs`, `target_probs_values` and `target_probs_indices` (int32) [R, S, K].
So a row's first token is in none of the fields; nothing is trained on it. In shards written by
fledge it is in the header (which AutoModel does not read), along with the places of the rows; in
others it is taken to be 0.

Shapes: R rows of a shard, S their padded length, D target hidden, W draft vocabulary, K kept
probabilities.
"""

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.reading import parse_json
from fledge.core.rows import TokenRow
from fledge.target.cache.format import KEY_BYTES, SAFETENSORS, CacheShape, safetensors_header
from fledge.target.cache.shard import mapped, reserve, row_key, write_at

# AutoModel's names for our fields, where they differ.
_AUTOMODEL_NAMES = {"topk_probs": "target_probs_values", "topk_ids": "target_probs_indices"}
_INTEGERS = ("input_ids", "attention_mask", "loss_mask")


def padded_shard_name(index: int) -> str:
    return f"shard-{index:06d}.safetensors"


def their_fields(shape: CacheShape) -> dict[str, tuple[torch.dtype, int]]:
    """AutoModel's fields: name -> (dtype, values per slot)."""
    fields = dict.fromkeys(_INTEGERS, (torch.int64, 1))
    for field in (*shape.token_fields(), *shape.slot_fields()):
        dtype = torch.bool if field.name == "position_mask" else field.dtype
        fields[_AUTOMODEL_NAMES.get(field.name, field.name)] = dtype, field.width
    return fields


@dataclass(frozen=True)
class _Place:
    begin: int  # byte of the first row
    slot_bytes: int


class PaddedLayout:
    """The byte layout of a padded shard with the given rows."""

    def __init__(self, shape: CacheShape, rows: Sequence[TokenRow], width: int) -> None:
        self.shape, self.width = shape, width
        lengths = [len(row.input_ids) for row in rows]
        if lengths and max(lengths) > width:
            raise BadInput(f"a row of {max(lengths)} tokens does not fit into {width}")
        self.row_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        fields = their_fields(shape)
        names = sorted(fields, key=lambda name: (-fields[name][0].itemsize, name))
        facts = {
            "places": [row.place for row in rows],
            "truncated": [bool(row.truncated) for row in rows],
            "first": [[int(row.input_ids[0]), int(row.loss_mask[0])] for row in rows],
        }
        stacked = [
            (name, fields[name][0], _stacked_shape(name, len(rows), width, fields[name][1]))
            for name in names
        ]
        self.header = safetensors_header(stacked, {"fledge": json.dumps(facts, sort_keys=True)})
        self.places: dict[str, _Place] = {}
        at = len(self.header)
        for name, dtype, size in stacked:
            self.places[name] = _Place(at, fields[name][1] * dtype.itemsize)
            at += math.prod(size) * dtype.itemsize
        self.n_bytes = at

    def at(self, name: str, row: int, slot: int = 0) -> int:
        place = self.places[name]
        return place.begin + (row * self.width + slot) * place.slot_bytes


def _stacked_shape(name: str, rows: int, width: int, values: int) -> list[int]:
    return [rows, width] if name in _INTEGERS else [rows, width, values]


class PaddedWriter:
    """Fills the file of one padded shard; whatever is not written stays zero."""

    def __init__(self, descriptor: int, layout: PaddedLayout, rows: Sequence[TokenRow]) -> None:
        self._descriptor, self._layout, self._rows = descriptor, layout, rows
        self._written = np.zeros(len(rows), dtype=np.bool_)
        reserve(descriptor, layout.n_bytes)
        write_at(descriptor, 0, layout.header)
        for number, row in enumerate(rows):
            self._put("input_ids", number, np.asarray(row.input_ids[1:], dtype=np.int64))
            self._put("loss_mask", number, np.asarray(row.loss_mask[1:], dtype=np.int64))
            self._put("attention_mask", number, np.ones(len(row.input_ids), dtype=np.int64))

    def put(self, row: int, payload: dict[str, Tensor]) -> None:
        """Write the target's answer for one row; takes the same payload as `ShardWriter.put`."""
        shape = self._layout.shape
        for field in shape.token_fields():
            self._put(field.name, row, _bytes(payload[field.name]))
        slots = shape.slots(np.asarray(self._rows[row].loss_mask))
        runs = np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) != 1) + 1)
        for field in shape.slot_fields():
            data = _bytes(payload[field.name]).reshape(len(slots), field.row_bytes)
            for run in runs if len(slots) else ():
                name = _AUTOMODEL_NAMES.get(field.name, field.name)
                self._put(name, row, data[run[0] : run[-1] + 1], int(slots[run[0]]))
        self._written[row] = True

    def _put(self, name: str, row: int, values: NDArray[Any], slot: int = 0) -> None:
        data = np.ascontiguousarray(values).data.cast("B") if values.size else b""
        write_at(self._descriptor, self._layout.at(name, row, slot), data)

    def finish(self) -> None:
        missing = np.flatnonzero(~self._written)
        assert not len(missing), f"rows {missing[:3]} of the shard were never written"


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    raw: NDArray[np.uint8] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return raw


@contextmanager
def open_padded(
    path: Path, layout: PaddedLayout, rows: Sequence[TokenRow]
) -> Iterator[PaddedWriter]:
    """Fill a shard. It appears when the block succeeds; nothing remains when the block fails."""
    with atomic_file(path) as handle:
        writer = PaddedWriter(handle.fileno(), layout, rows)
        yield writer
        writer.finish()


@dataclass(frozen=True)
class _Extent:
    row_start: NDArray[np.int64]
    n_bytes: int


class PaddedShard:
    """A finished padded shard, memory-mapped, with the interface of `shard.Shard`.

    `order_W` sorts its columns by ascending target id, which is our order; None if they already
    are. There are no checksums: every row is assumed to be whole.
    """

    def __init__(self, path: Path, shape: CacheShape, order_W: NDArray[np.int64] | None) -> None:
        self.path, self._shape, self._order_W = path, shape, order_W
        self._map = mapped(path)
        try:
            length = int.from_bytes(self._map[:8], "little")
            header = parse_json(self._map[8 : 8 + length], where=str(path))
            facts_json = (header.get("__metadata__") or {}).get("fledge", "{}")
            facts = parse_json(facts_json.encode(), where=str(path))
            self._fields = self._open_fields(header, 8 + length)
            rows = len(self._fields["input_ids"])
            default_places = [f"{path.name}:{row + 1}" for row in range(rows)]
            self.places: list[str] = facts.get("places") or default_places
            self.truncated: list[bool] = facts.get("truncated") or [False] * rows
            self._first_R2 = np.array(facts.get("first") or [[0, 0]] * rows).reshape(rows, 2)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"the shard cannot be read ({error})", where=str(path)) from None
        self._lengths = self._row_lengths()
        starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        self.layout = _Extent(starts, len(self._map))

    def _open_fields(self, header: dict[str, Any], data: int) -> dict[str, NDArray[np.uint8]]:
        """name -> bytes [R, S, bytes per slot]; raises unless they match the manifest."""
        file_bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        rows, width = header["input_ids"]["shape"]
        fields = {}
        for name, (dtype, values) in their_fields(self._shape).items():
            entry, expected = header[name], _stacked_shape(name, rows, width, values)
            if entry["dtype"] != SAFETENSORS[dtype] or entry["shape"] != expected:
                actual = f"{entry['dtype']} {entry['shape']}"
                raise ValueError(f"{name} is {actual}, not {SAFETENSORS[dtype]} {expected}")
            begin, end = entry["data_offsets"]
            fields[name] = file_bytes[data + begin : data + end].reshape(rows, width, -1)
        return fields

    def _integers(self, name: str) -> NDArray[np.int64]:
        return self._fields[name].view(np.int64)[..., 0]

    def _row_lengths(self) -> NDArray[np.int64]:
        real_RS = self._integers("attention_mask")
        lengths_R: NDArray[np.int64] = real_RS.sum(1)
        if not np.array_equal(real_RS, np.arange(real_RS.shape[1]) < lengths_R[:, None]):
            raise BadInput("attention_mask is not right-padded", where=str(self.path))
        return lengths_R

    def __len__(self) -> int:
        return len(self._lengths)

    @cached_property
    def keys(self) -> NDArray[np.uint8]:
        keys = b"".join(row_key(self.tokens(row)[0]) for row in range(len(self)))
        return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)

    @property
    def loss_mask(self) -> NDArray[np.uint8]:
        """The loss masks of all rows, end to end."""
        return np.concatenate([self.tokens(row)[1] for row in range(len(self))])

    def tokens(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        later, (first, supervised) = max(0, int(self._lengths[row]) - 1), self._first_R2[row]
        ids = np.concatenate([[first], self._integers("input_ids")[row, :later]])
        mask = np.concatenate([[supervised], self._integers("loss_mask")[row, :later] != 0])
        return ids.astype(np.int32), mask.astype(np.uint8)

    def payload(self, name: str, row: int) -> NDArray[np.uint8]:
        """The bytes of one row in one of our payload tensors."""
        data_SX: NDArray[np.uint8] = self._fields[_AUTOMODEL_NAMES.get(name, name)][row]
        if name == "aux_hidden_states":
            return data_SX[: int(self._lengths[row])].reshape(-1)
        kept_MX: NDArray[Any] = data_SX[self._shape.slots(self.tokens(row)[1])]
        if self._order_W is not None and name == "target_probs":
            kept_MX = kept_MX.view(f"u{self._shape.dtype.itemsize}")[:, self._order_W]
        elif self._order_W is not None and name == "topk_ids":
            rank_W = np.argsort(self._order_W).astype(np.int32)
            kept_MX = rank_W[kept_MX.view(np.int32)]
        raw: NDArray[np.uint8] = np.ascontiguousarray(kept_MX).view(np.uint8)
        return raw.reshape(-1)

    def is_whole(self, row: int) -> bool:
        """True for every row of the shard: there is no checksum to compare."""
        return 0 <= row < len(self)

    def read_ahead(self, row: int) -> None:
        """Have the operating system fetch a row in the background."""
        base: int = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        for data in self._fields.values():
            begin = data[row].ctypes.data - base
            used = int(self._lengths[row]) * data.shape[-1]
            page = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + used - page)
