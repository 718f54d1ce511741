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
from math import prod

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import first_line
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, HasWeight, TargetInfo
from fledge.target.cache.format import from_fp8, to_fp8
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.packing import find_documents

log = logging.getLogger(__name__)

_BLOCK = 256 << 20  # bytes; a power of two, to which torch rounds pinned memory up
_ALIGNMENT = 256  # bytes between the parts of a block

Parts = tuple[Tensor, ...]  # of one document, or of a block of them: [n, ...] each


@dataclass(frozen=True)
class KeptStates:
    """Memory for states: on the target's device first, then in host memory."""

    device_bytes: int = 0
    host_bytes: int = 0
    eight_bits: bool = False

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


def find_memory(memories: Sequence[Memory], like: Parts) -> Parts | None:
    """A part of the first memory that has enough left."""
    for memory in memories:
        if (part := memory.take(like)) is not None:
            return part
    return None


@dataclass(frozen=True)
class _Reserved:
    """Memory for a document whose states were lost, and the pack to recompute them from."""

    place: Parts
    pack: Callable[[], TokenBatch]


Span = tuple[slice, bytes]  # the slots of a document in its flattened batch, and its key


class RememberingTarget(Eagle3TargetBackend):
    """Wraps a backend with `hidden` supervision and keeps as many states as fit: in
    8 bits as in the cache's `hidden-fp8`, with a scale per token and layer, or as they are."""

    def __init__(self, inner: Eagle3TargetBackend, kept: KeptStates) -> None:
        super().__init__("hidden")
        self.inner, self.aux_layer_ids = inner, inner.aux_layer_ids
        self._memories = (Memory(kept.device_bytes), Memory(kept.host_bytes, on_host=True))
        self._eight_bits = kept.eight_bits
        self._dtype: torch.dtype | None = None  # of the states, known after the first answer
        # by document; hidden states are shifted, so the last slot of each is never read
        self.known: dict[bytes, Parts] = {}
        self._reserved: dict[bytes, _Reserved] = {}

    def info(self) -> TargetInfo:
        return self.inner.info()

    def get_input_embeddings(self) -> HasWeight:
        return self.inner.get_input_embeddings()

    @cached_property
    def _device(self) -> torch.device:
        """The device of the answers. Looking it up in a large model takes a millisecond a step."""
        return self.get_input_embeddings().weight.device

    def close(self) -> None:
        self.known.clear()
        self._reserved.clear()
        self.inner.close()
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
                example = self._packed(self.inner.answer(rows))
            for span, key in spans:
                like = tuple(part[: span.stop - span.start] for part in example)
                if self._is_new(key) and (place := find_memory(self._memories, like)) is not None:
                    self._reserved[key] = _Reserved(place, pack)

    def _is_new(self, key: bytes) -> bool:
        return key not in self.known and key not in self._reserved

    def _packed(self, batch: Eagle3TargetBatch) -> Parts:
        """An answer's states as they are kept, one row for each slot of the flattened batch."""
        assert batch.last_hidden_states is not None
        aux_ND = batch.aux_hidden_states.flatten(0, 1)
        hidden_ND, self._dtype = batch.last_hidden_states.flatten(0, 1), aux_ND.dtype
        if not self._eight_bits:
            return aux_ND, hidden_ND
        return *to_fp8(aux_ND, len(self.aux_layer_ids)), *to_fp8(hidden_ND, 1)

    def _learn(self, batch: Eagle3TargetBatch, spans: list[Span]) -> None:
        """Keep the states of new documents, as long as they fit."""
        parts = self._packed(batch)
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
            parts = self._packed(self.inner.answer(rows))
            copies: list[tuple[Tensor, Tensor]] = []
            for span, neighbour in _spans(rows) or []:
                reserved = self._reserved.get(neighbour)
                if reserved is not None and reserved.pack is pack:
                    self.known[neighbour] = self._reserved.pop(neighbour).place
                    copies += zip(reserved.place, (part[span] for part in parts), strict=True)
            copy_all(copies)

    def _recall(self, rows: TokenBatch, spans: list[Span]) -> Eagle3TargetBatch:
        device = self._device
        parts = tuple(
            part.new_zeros((rows.tokens, part.shape[-1]), device=device)
            for part in self.known[spans[0][1]]
        )
        copy_all(
            (to[span], kept)
            for span, key in spans
            for to, kept in zip(parts, self.known[key], strict=True)
        )
        if self._eight_bits:
            aux8, aux_scale, hidden8, hidden_scale = parts
            assert self._dtype is not None
            aux = from_fp8(aux8, aux_scale, self._dtype)
            hidden = from_fp8(hidden8, hidden_scale, self._dtype)
        else:
            aux, hidden = parts
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=aux.view(*rows.shape, -1),
            last_hidden_states=hidden.view(*rows.shape, -1),
            shifted=True,
        )


def colocated(target: Eagle3TargetBackend) -> HFEagle3TargetModel | None:
    """The Hugging Face target behind a backend, remembered or not; None: it runs elsewhere."""
    inner = target.inner if isinstance(target, RememberingTarget) else target
    return inner if isinstance(inner, HFEagle3TargetModel) else None


def _spans(rows: TokenBatch) -> list[Span] | None:
    """The documents of packed rows; None when the rows are padded."""
    documents = find_documents(rows)
    if documents is None:
        return None
    flat = rows.input_ids.flatten()
    places = zip(documents.starts, documents.lengths, strict=True)
    slots = [slice(start, start + length) for start, length in places]
    return [(span, _key(flat[span])) for span in slots]


def _key(ids: Tensor) -> bytes:
    return hashlib.blake2b(ids.cpu().numpy().tobytes(), digest_size=16).digest()
