"""A target that remembers: states of documents seen before come from memory, not from a forward.

The frozen target gives the same answers in every epoch. Where its forward is the larger half of a
step (a laptop CPU), later epochs only pay for the draft.

Which pack a document was first answered in decides how its states are rounded, because matrix
products of other shapes round differently. A resumed run has lost the states of the epochs before,
so it recomputes each document in that same first pack (`asked_before`), and continues bit for bit.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, HasWeight, TargetInfo
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kept import AsTheyAre, InEightBits, Memory, Parts, copy_all, find_room
from fledge.target.packing import find_documents
from fledge.target.room import KeptStates


@dataclass(frozen=True)
class States:
    """States of documents, end to end, in two large tensors that processes can share."""

    keys: list[bytes]
    lengths: list[int]
    aux_ND: Tensor
    hidden_ND: Tensor


@dataclass(frozen=True)
class _Reserved:
    """Memory for a document whose states were lost, and the pack to recompute them from."""

    room: Parts
    pack: Callable[[], TokenBatch]


Span = tuple[slice, bytes]  # the slots of a document in its flattened batch, and its key


class RememberingTarget(Eagle3TargetBackend):
    """Wraps a backend with `hidden` supervision and keeps as many states as there is `room` for,
    in addition to those passed as `known`."""

    def __init__(
        self, inner: Eagle3TargetBackend, room: KeptStates, known: States | None = None
    ) -> None:
        super().__init__("hidden")
        if inner.supervision != "hidden":
            raise ValueError(f"only hidden supervision is remembered, not {inner.supervision!r}")
        self.inner, self.aux_layer_ids = inner, inner.aux_layer_ids
        self._memories = (Memory(room.device_bytes), Memory(room.host_bytes, on_host=True))
        self._eight_bits = room.eight_bits
        self._form: AsTheyAre | InEightBits = AsTheyAre()
        # by document; hidden states are shifted, so the last slot of each is never read
        self._known: dict[bytes, Parts] = {}
        self._reserved: dict[bytes, _Reserved] = {}
        if known is not None:
            if room.eight_bits:
                raise ValueError("known states are not in 8 bits")
            parts = [torch.split(x, known.lengths) for x in (known.aux_ND, known.hidden_ND)]
            self._known = dict(zip(known.keys, zip(*parts, strict=True), strict=True))

    def states(self) -> States:
        """A copy of all known states, for other targets of the same model."""
        if self._device.type == "cuda":  # copies to the host may still be in progress
            torch.cuda.synchronize(self._device)
        known = self._known.values()
        device = next((part.device for parts in known for part in parts if part.is_cuda), None)
        moved = [tuple(part.to(device) for part in parts) for parts in known]
        both = [self._form.unpack(parts) for parts in moved]
        lengths, aux = [len(aux) for aux, _ in both], torch.cat([aux for aux, _ in both])
        return States(list(self._known), lengths, aux, torch.cat([hidden for _, hidden in both]))

    def info(self) -> TargetInfo:
        return self.inner.info()

    def get_input_embeddings(self) -> HasWeight:
        return self.inner.get_input_embeddings()

    @cached_property
    def _device(self) -> torch.device:
        """The device of the answers. Looking it up in a large model takes a millisecond a step."""
        return self.get_input_embeddings().weight.device

    def close(self) -> None:
        self._known.clear()
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
                if self._is_new(key) and (room := find_room(self._memories, like)) is not None:
                    self._reserved[key] = _Reserved(room, pack)

    def _is_new(self, key: bytes) -> bool:
        return key not in self._known and key not in self._reserved

    def _packed(self, batch: Eagle3TargetBatch) -> Parts:
        """An answer's states as they are kept, one row for each slot of the flattened batch."""
        assert batch.last_hidden_states is not None
        aux_ND = batch.aux_hidden_states.flatten(0, 1)
        if self._eight_bits and isinstance(self._form, AsTheyAre):  # the first answer
            self._form = InEightBits(len(self.aux_layer_ids), aux_ND.dtype)
        return self._form.pack(aux_ND, batch.last_hidden_states.flatten(0, 1))

    def _learn(self, batch: Eagle3TargetBatch, spans: list[Span]) -> None:
        """Keep the states of new documents, as long as there is room."""
        parts = self._packed(batch)
        copies: list[tuple[Tensor, Tensor]] = []
        for span, key in spans:
            states = tuple(part[span] for part in parts)
            if self._is_new(key) and (room := find_room(self._memories, states)) is not None:
                self._known[key] = room
                copies += zip(room, states, strict=True)
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
                    self._known[neighbour] = self._reserved.pop(neighbour).room
                    copies += zip(reserved.room, (part[span] for part in parts), strict=True)
            copy_all(copies)

    def _recall(self, rows: TokenBatch, spans: list[Span]) -> Eagle3TargetBatch:
        device = self._device
        parts = tuple(
            part.new_zeros((rows.tokens, part.shape[-1]), device=device)
            for part in self._known[spans[0][1]]
        )
        copy_all(
            (to[span], kept)
            for span, key in spans
            for to, kept in zip(parts, self._known[key], strict=True)
        )
        aux, hidden = self._form.unpack(parts)
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
