"""The header of a GGUF file, checked against the file itself before a library trusts its numbers.

    4 bytes  GGUF       u32 version     u64 tensors     u64 keys
    keys     string, u32 type, value (an array: u32 type, u64 count, items)
    tensors  string, u32 dimensions, u64 each, u32 type, u64 offset into the data
    data     from the next multiple of `general.alignment` on

Every count and length must fit into the rest of the file, and every tensor into the data. Only the
names are allocated here.
"""

import math
import mmap
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.core.reading import open_regular

MAGIC = b"GGUF"
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _U32 = 8, 9, 4
_LONGEST_NAME, _MOST_DIMENSIONS = 1 << 12, 4


class _DamageError(Exception):
    """The header is damaged; the message says how, in a few words."""


def check_header(path: Path) -> None:
    """Refuse a file whose header describes more than the file can hold."""
    with open_regular(path) as handle:
        try:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # empty
            raise BadInput("not a GGUF file (it is empty)", where=str(path)) from None
    with data:
        try:
            _HeaderReader(data).check()
        except _DamageError as damage:
            fix = "the file is cut short or damaged: fetch it again"
            raise BadInput(
                f"cannot convert: its header says {damage}", where=str(path), fix=fix
            ) from None


class _HeaderReader:
    """Reads a header from its first byte to its last."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._offset = data, len(data), 0

    def check(self) -> None:
        if self._take(4) != MAGIC or self._number(4) not in (2, 3):
            raise _DamageError("neither version 2 nor 3")
        tensors, keys = self._number(8), self._number(8)
        self._check_fits(tensors, 24, "tensors")
        self._check_fits(keys, 13, "keys")
        names: set[bytes] = set()
        alignment = 32
        for _ in range(keys):
            name, kind = self._name(names), self._number(4)
            if name == b"general.alignment" and kind == _U32:
                alignment = int.from_bytes(self._data[self._offset : self._offset + 4], "little")
            self._skip_value(kind)
        if alignment < 1 or alignment > 1 << 20:
            raise _DamageError(f"an alignment of {alignment}")
        names.clear()
        extents = [self._tensor(names) for _ in range(tensors)]
        data_bytes = self._size - -(-self._offset // alignment) * alignment
        if any(offset + count > data_bytes for offset, count in extents):
            raise _DamageError("a tensor ends after the file does")
        if sum(count for _, count in extents) > data_bytes:
            raise _DamageError("tensors overlap")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._offset:
            raise _DamageError(f"{count} bytes at byte {self._offset} of {self._size}")
        self._offset += count
        return self._data[self._offset - count : self._offset]

    def _number(self, n_bytes: int) -> int:
        return int.from_bytes(self._take(n_bytes), "little")

    def _check_fits(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._offset:
            raise _DamageError(f"{count} {what} at byte {self._offset} of {self._size}")

    def _name(self, names: set[bytes]) -> bytes:
        length = self._number(8)
        if not 0 < length <= _LONGEST_NAME:
            raise _DamageError(f"a name of {length} bytes")
        name = self._take(length)
        if name in names:
            raise _DamageError(f"{name[:60]!r} stands there twice")
        names.add(name)
        return name

    def _skip_value(self, kind: int) -> None:
        """Skip one value."""
        if kind in _ITEM_BYTES:
            self._take(_ITEM_BYTES[kind])
        elif kind == _STRING:
            self._skip_items(self._number(8), 1)
        elif kind == _ARRAY:
            item, count = self._number(4), self._number(8)
            if item in _ITEM_BYTES:
                self._skip_items(count, _ITEM_BYTES[item])
            elif item == _STRING:
                self._check_fits(count, 8, "strings")
                for _ in range(count):
                    self._skip_items(self._number(8), 1)
            else:
                raise _DamageError(f"an array of type {item}")
        else:
            raise _DamageError(f"a value of type {kind}")

    def _skip_items(self, count: int, item_bytes: int) -> None:
        """Skip items without reading them."""
        self._check_fits(count, item_bytes, "items")
        self._offset += count * item_bytes

    def _tensor(self, names: set[bytes]) -> tuple[int, int]:
        """(offset, bytes) of one tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._name(names), self._number(4)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _DamageError(f"{name[:60]!r} has {dimensions} dimensions")
        shape = [self._number(8) for _ in range(dimensions)]
        kind, offset = self._number(4), self._number(8)
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise _DamageError(f"{name[:60]!r} is of type {kind}") from None
        if 0 in shape or shape[0] % block:
            raise _DamageError(f"{name[:60]!r} has the shape {shape}")
        return offset, math.prod(shape) // block * block_bytes
