"""A target that remembers: states of documents seen before come from memory, not from a forward.

The frozen target gives the same answers in every epoch. Where its forward is the larger half of a
step (a laptop CPU), later epochs only pay for the draft.

Which pack a document was first answered in decides how its states are rounded, because matrix
products of other shapes round differently. A resumed run has lost the states of the epochs before,
so it recomputes each document in that same first pack (`asked_before`), and continues bit for bit.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import first_line
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, WrappedTarget
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.packing import find_documents

log = logging.getLogger(__name__)

_BLOCK = 256 << 20  # bytes; a power of two, to which torch rounds pinned memory up

Parts = tuple[Tensor, ...]  # aux and last hidden states of a document, or of a block: [n, ...] each


@dataclass(frozen=True)
class KeptStates:
    """Memory for states: on the target's device first, then in host memory."""

    device_bytes: int = 0
    host_bytes: int = 0

    def __bool__(self) -> bool:
        return self.device_bytes + self.host_bytes > 0


class Memory:
    """A number of bytes for parts that differ only in length, allocated in large blocks. Host
    blocks are pinned if a GPU fills them: copies to and from them run on its stream, in order."""

    def __init__(self, most: int, *, on_host: bool = False) -> None:
        self._left, self._on_host = most, on_host
        self._rest: Parts | None = None  # of the newest block

    def take(self, like: Parts) -> Parts | None:
        """Memory to copy such parts to; None if too little is left."""
        count = len(like[0])
        if self._rest is None or len(self._rest[0]) < count:
            block = self._new_block(like, count)
            if block is None:
                return None
            self._rest = block
        taken = tuple(part[:count] for part in self._rest)
        self._rest = tuple(part[count:] for part in self._rest)
        return taken

    def _new_block(self, like: Parts, count: int) -> Parts | None:
        """A block for at least `count` rows, in one allocation."""
        row_bytes = sum(part[0].nbytes for part in like)
        rows = max(count, min(_BLOCK, self._left) // row_bytes)
        if rows * row_bytes > self._left:
            return None
        try:
            flat = self._allocate(rows * row_bytes, like[0].device)
        except RuntimeError as error:  # there is less memory than configured
            log.warning("no more states are kept: %s", first_line(error))
            self._left = 0
            return None
        self._left -= rows * row_bytes
        pieces = torch.split(flat, [rows * part[0].nbytes for part in like])
        return tuple(
            piece.view(part.dtype).view(rows, *part.shape[1:])
            for piece, part in zip(pieces, like, strict=True)
        )

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        if not self._on_host:
            return torch.empty(size, dtype=torch.uint8, device=device)
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; those on one device take a few launches."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for to, source in pairs:
        both = by_device.setdefault(source.device, ([], []))
        both[0].append(to)
        both[1].append(source)
    for into, sources in by_device.values():
        torch._foreach_copy_(into, sources, non_blocking=True)


def find_memory(memories: Sequence[Memory], like: Parts) -> Parts | None:
    """A part of the first memory that has enough left."""
    parts = (memory.take(like) for memory in memories)
    return next((part for part in parts if part is not None), None)


@dataclass(frozen=True)
class _Reserved:
    """Memory for a document whose states were lost, and the pack to recompute them from."""

    place: Parts
    pack: Callable[[], TokenBatch]


Span = tuple[slice, bytes]  # the slots of a document in its flattened batch, and its key


class RememberingTarget(WrappedTarget):
    """Wraps a backend with `hidden` supervision and keeps as many states as fit."""

    def __init__(self, inner: Eagle3TargetBackend, kept: KeptStates) -> None:
        super().__init__(inner, inner.aux_layer_ids)
        self._memories = (Memory(kept.device_bytes), Memory(kept.host_bytes, on_host=True))
        # by document; hidden states are shifted, so the last slot of each is never read
        self.known: dict[bytes, Parts] = {}
        self._reserved: dict[bytes, _Reserved] = {}

    @cached_property
    def _device(self) -> torch.device:
        """The device of the answers. Looking it up in a large model takes a millisecond a step."""
        return self.get_input_embeddings().weight.device

    def close(self) -> None:
        self.known.clear()
        self._reserved.clear()
        super().close()

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        self._check_open()
        spans = _spans(rows)
        if spans is None:  # padded rows are not looked up: packs of one document do the same
            return self.inner.answer(rows)
        if not spans or any(self._is_new(key) for _, key in spans):
            batch = self.inner.answer(rows)
            self._learn(batch, spans)
            return batch
        self._recompute_lost(spans)
        return self._recall(rows, spans)

    @torch.no_grad()
    def asked_before(self, packs: Iterable[Callable[[], TokenBatch]]) -> None:
        """Reserve memory for every document that was kept then, in the same order: where not all
        of them fit, the same ones do. Their states are recomputed when they are next needed."""
        example: Parts | None = None
        for pack in packs:
            rows = pack()
            spans = _spans(rows) or []
            if not any(self._is_new(key) for _, key in spans):
                continue
            if example is None:  # for the shapes and types of what is kept
                example = _states(self.inner.answer(rows))
            for span, key in spans:
                like = tuple(part[: span.stop - span.start] for part in example)
                if self._is_new(key) and (place := find_memory(self._memories, like)) is not None:
                    self._reserved[key] = _Reserved(place, pack)

    def _is_new(self, key: bytes) -> bool:
        return key not in self.known and key not in self._reserved

    def _learn(self, batch: Eagle3TargetBatch, spans: list[Span]) -> None:
        """Keep the states of new documents, as long as they fit."""
        parts = _states(batch)
        copies: list[tuple[Tensor, Tensor]] = []
        for span, key in spans:
            states = tuple(part[span] for part in parts)
            if self._is_new(key) and (place := find_memory(self._memories, states)) is not None:
                self.known[key] = place
                copies += zip(place, states, strict=True)
        copy_all(copies)

    def _recompute_lost(self, spans: list[Span]) -> None:
        """Recompute documents that an earlier process had kept, each in the pack it was first
        answered in, together with all others that were first answered there."""
        for _, key in spans:
            if key not in self._reserved:
                continue
            pack = self._reserved[key].pack
            rows = pack()
            parts = _states(self.inner.answer(rows))
            copies: list[tuple[Tensor, Tensor]] = []
            for span, neighbour in _spans(rows) or []:
                reserved = self._reserved.get(neighbour)
                if reserved is not None and reserved.pack is pack:
                    self.known[neighbour] = self._reserved.pop(neighbour).place
                    copies += zip(reserved.place, (part[span] for part in parts), strict=True)
            copy_all(copies)

    def _recall(self, rows: TokenBatch, spans: list[Span]) -> Eagle3TargetBatch:
        parts = tuple(
            part.new_zeros((rows.tokens, part.shape[-1]), device=self._device)
            for part in self.known[spans[0][1]]
        )
        copy_all(
            (to[span], kept)
            for span, key in spans
            for to, kept in zip(parts, self.known[key], strict=True)
        )
        aux, hidden = (part.view(*rows.shape, -1) for part in parts)
        return Eagle3TargetBatch.about(
            rows, aux_hidden_states=aux, last_hidden_states=hidden, shifted=True
        )


def colocated(target: Eagle3TargetBackend) -> HFEagle3TargetModel | None:
    """The Hugging Face target behind a backend, remembered or not; None: it runs elsewhere."""
    inner = target.inner if isinstance(target, RememberingTarget) else target
    return inner if isinstance(inner, HFEagle3TargetModel) else None


def _states(batch: Eagle3TargetBatch) -> Parts:
    """An answer's states, one row for each slot of the flattened batch."""
    assert batch.last_hidden_states is not None
    return batch.aux_hidden_states.flatten(0, 1), batch.last_hidden_states.flatten(0, 1)


def _spans(rows: TokenBatch) -> list[Span] | None:
    """The documents of packed rows; None when the rows are padded."""
    documents = find_documents(rows)
    if documents is None:
        return None
    flat = rows.input_ids.flatten().cpu().numpy()
    places = zip(documents.starts, documents.lengths, strict=True)
    spans = [slice(start, start + length) for start, length in places]
    return [(s, hashlib.blake2b(flat[s].tobytes(), digest_size=16).digest()) for s in spans]
