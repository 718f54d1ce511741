"""States of documents kept in memory, for later epochs: on the target's device, then in the host's.

Blocks are large, and host blocks are pinned where a GPU fills them: it copies to and from them on
its own stream, in order, while the host goes on. Nobody waits, and nothing is looked at here.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fledge.core.errors import first_line
from fledge.target.cache.codec import from_fp8, to_fp8

log = logging.getLogger(__name__)

_BLOCK = 256 << 20  # bytes; a power of two, to which pinned memory is rounded up

Parts = tuple[Tensor, ...]  # of one document, or of a block of them: [n, ...] each


class Memory:
    """Room for so many bytes of parts that are always alike but for their length."""

    def __init__(self, most: int, *, on_host: bool = False) -> None:
        self._left, self._on_host = most, on_host
        self._rest: Parts | None = None  # of the newest block

    def room(self, like: Parts) -> Parts | None:
        """Where to copy them; None: it is full."""
        count = len(like[0])
        if self._rest is None or len(self._rest[0]) < count:
            row_bytes = sum(part.nbytes for part in like) // max(1, count)
            rows = max(count, min(_BLOCK, self._left) // max(1, row_bytes))
            if rows * row_bytes > self._left:
                return None
            try:
                self._rest = tuple(self._block(part, rows) for part in like)
            except RuntimeError as error:  # less memory than was said: what is there has to do
                log.warning("no more states are kept: %s", first_line(error))
                self._left = 0
                return None
            self._left -= rows * row_bytes
        taken = tuple(part[:count] for part in self._rest)
        self._rest = tuple(part[count:] for part in self._rest)
        return taken

    def _block(self, like: Tensor, rows: int) -> Tensor:
        shape = (rows, *like.shape[1:])
        if not self._on_host:
            return like.new_empty(shape)
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first: those on one device in a few launches."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in pairs:
        both = by_device.setdefault(source.device, ([], []))
        both[0].append(to)
        both[1].append(source)
    for into, sources in by_device.values():
        torch._foreach_copy_(into, sources, non_blocking=True)


class AsTheyAre:
    """Aux states [n, A * D] and last states [n, D], number for number."""

    def pack(self, aux_ND: Tensor, hidden_ND: Tensor) -> Parts:
        return aux_ND, hidden_ND

    def unpack(self, parts: Parts) -> tuple[Tensor, Tensor]:
        aux_ND, hidden_ND = parts
        return aux_ND, hidden_ND


class InEightBits:
    """Half of that, as the cache's `hidden-fp8`: a scale for each token and layer."""

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
    """In the first memory that has some."""
    for memory in memories:
        if (room := memory.room(like)) is not None:
            return room
    return None
