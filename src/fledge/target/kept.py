"""States of documents kept in memory for later epochs: on the target's device, then on the host.

Memory is allocated in large blocks. Host blocks are pinned if a GPU fills them: copies to and from
them run on its stream, in order, while the host continues.
"""

import logging
from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from fledge.core.errors import first_line
from fledge.target.cache.codec import from_fp8, to_fp8

log = logging.getLogger(__name__)

_BLOCK = 256 << 20  # bytes; a power of two, to which torch rounds pinned memory up
_ALIGNMENT = 256  # bytes between the parts of a block

Parts = tuple[Tensor, ...]  # of one document, or of a block of them: [n, ...] each


class Memory:
    """Room for a number of bytes of parts that differ only in length."""

    def __init__(self, most: int, *, on_host: bool = False) -> None:
        self._left, self._on_host = most, on_host
        self._rest: Parts | None = None  # of the newest block

    def room(self, like: Parts) -> Parts | None:
        """Where to copy such parts; None if there is no room left."""
        count = len(like[0])
        rest = self._rest
        if rest is None or len(rest[0]) < count:
            rest = self._new_block(like, count)
            if rest is None:
                return None
        self._rest = tuple(part[count:] for part in rest)
        return tuple(part[:count] for part in rest)

    def _new_block(self, like: Parts, count: int) -> Parts | None:
        """A block for at least `count` rows, in one allocation."""
        gaps = _ALIGNMENT * (len(like) - 1)
        row_bytes = sum(part.nbytes for part in like) // max(1, count)
        rows = max(count, (min(_BLOCK, self._left) - gaps) // max(1, row_bytes))
        size = rows * row_bytes + gaps
        if size > self._left:
            return None
        try:
            flat = self._allocate(size, like[0].device)
        except RuntimeError as error:  # there is less memory than configured
            log.warning("no more states are kept: %s", first_line(error))
            self._left = 0
            return None
        self._left -= size
        return _divide(flat, like, rows)

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        if not self._on_host:
            return torch.empty(size, dtype=torch.uint8, device=device)
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _divide(flat: Tensor, like: Parts, rows: int) -> Parts:
    """Views of a block of bytes: `rows` rows of every part."""
    parts, begin = [], 0
    for part in like:
        shape = (rows, *part.shape[1:])
        end = begin + prod(shape) * part.itemsize
        parts.append(flat[begin:end].view(part.dtype).view(shape))
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
    return tuple(parts)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; those on one device take a few launches."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in pairs:
        both = by_device.setdefault(source.device, ([], []))
        both[0].append(to)
        both[1].append(source)
    for into, sources in by_device.values():
        torch._foreach_copy_(into, sources, non_blocking=True)


class AsTheyAre:
    """Aux states [n, A * D] and last states [n, D], unchanged."""

    def pack(self, aux_ND: Tensor, hidden_ND: Tensor) -> Parts:
        return aux_ND, hidden_ND

    def unpack(self, parts: Parts) -> tuple[Tensor, Tensor]:
        aux_ND, hidden_ND = parts
        return aux_ND, hidden_ND


class InEightBits:
    """The same in half the memory, as in the cache's `hidden-fp8`: a scale per token and layer."""

    def __init__(self, aux_layers: int, dtype: torch.dtype) -> None:
        self._aux_layers, self._dtype = aux_layers, dtype

    def pack(self, aux_ND: Tensor, hidden_ND: Tensor) -> Parts:
        return *to_fp8(aux_ND, self._aux_layers), *to_fp8(hidden_ND, 1)

    def unpack(self, parts: Parts) -> tuple[Tensor, Tensor]:
        aux_ND, aux_scale, hidden_ND, hidden_scale = parts
        return (
            from_fp8(aux_ND, aux_scale, self._dtype),
            from_fp8(hidden_ND, hidden_scale, self._dtype),
        )


def find_room(memories: Sequence[Memory], like: Parts) -> Parts | None:
    """Room in the first memory that has any."""
    for memory in memories:
        if (room := memory.room(like)) is not None:
            return room
    return None
