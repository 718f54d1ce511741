"""A target that remembers: states of documents seen before come from memory, not from a forward.

The frozen target answers alike in every epoch. Where its forward is the larger half of a step (a
laptop CPU), later epochs then cost the draft alone.
"""

import hashlib
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
    """What a target said of documents, end to end: two large tensors, which processes can share."""

    keys: list[bytes]
    lengths: list[int]
    aux_ND: Tensor
    hidden_ND: Tensor


class RememberingTarget(Eagle3TargetBackend):
    """Wraps a backend with `hidden` supervision; keeps as many states as there is `room` for,
    besides those that it is given as `known`."""

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
        # of a document, end to end; hidden states are shifted, and their last slot is never read
        self._known: dict[bytes, Parts] = {}
        if known is not None:
            if room.eight_bits:
                raise ValueError("known states are not in 8 bits")
            parts = [torch.split(x, known.lengths) for x in (known.aux_ND, known.hidden_ND)]
            self._known = dict(zip(known.keys, zip(*parts, strict=True), strict=True))

    def states(self) -> States:
        """All that is known, for other targets of the same model; a copy."""
        both = [self._form.unpack(parts) for parts in self._known.values()]
        lengths, aux = [len(aux) for aux, _ in both], torch.cat([aux for aux, _ in both])
        return States(list(self._known), lengths, aux, torch.cat([hidden for _, hidden in both]))

    def info(self) -> TargetInfo:
        return self.inner.info()

    def get_input_embeddings(self) -> HasWeight:
        return self.inner.get_input_embeddings()

    @cached_property
    def _device(self) -> torch.device:
        """Where answers lie. Asking a large model for it at every step would take a millisecond."""
        return self.get_input_embeddings().weight.device

    def close(self) -> None:
        self._known.clear()
        self.inner.close()
        super().close()

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        self._check_open()
        documents = find_documents(rows)
        if documents is None:  # padded rows are not looked up: packs of one do the same
            return self.inner.answer(rows)
        flat = rows.input_ids.flatten()
        spans = [
            (slice(start, start + length), _key(flat[start : start + length]))
            for start, length in zip(documents.starts, documents.lengths, strict=True)
        ]
        if not spans or any(key not in self._known for _, key in spans):
            batch = self.inner.answer(rows)
            self._learn(batch, spans)
            return batch
        return self._recall(rows, spans)

    def _learn(self, batch: Eagle3TargetBatch, spans: list[tuple[slice, bytes]]) -> None:
        assert batch.last_hidden_states is not None
        aux = batch.aux_hidden_states.flatten(0, 1)
        if self._eight_bits and isinstance(self._form, AsTheyAre):  # nothing is kept yet
            self._form = InEightBits(len(self.aux_layer_ids), aux.dtype)
        parts = self._form.pack(aux, batch.last_hidden_states.flatten(0, 1))
        copies: list[tuple[Tensor, Tensor]] = []
        for span, key in spans:
            own = tuple(part[span] for part in parts)
            if key not in self._known and (room := find_room(self._memories, own)) is not None:
                self._known[key] = room
                copies += zip(room, own, strict=True)
        copy_all(copies)

    def _recall(self, rows: TokenBatch, spans: list[tuple[slice, bytes]]) -> Eagle3TargetBatch:
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


def _key(ids: Tensor) -> bytes:
    return hashlib.blake2b(ids.cpu().numpy().tobytes(), digest_size=16).digest()
