"""A target that remembers: states of documents seen before come from memory, not from a forward.

The frozen target gives the same answers in every epoch. Where its forward is the larger half of a
step (a laptop CPU), later epochs only pay for the draft.

Which pack a document was first answered in decides how its states are rounded, because matrix
products of other shapes round differently. A resumed run has lost the states of the epochs before,
so it recomputes each document in that same first pack (`asked_before`), and continues bit for bit.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend, WrappedTarget
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.packing import find_documents

States = tuple[Tensor, Tensor]  # aux and last hidden states of some slots: [n, ...] each
Span = tuple[slice, bytes]  # the slots of a document in its flattened batch, and its key


class RememberingTarget(WrappedTarget):
    """Wraps a backend with `hidden` supervision and keeps as many states as fit, on its device."""

    def __init__(self, inner: Eagle3TargetBackend, most_bytes: int) -> None:
        super().__init__(inner, inner.aux_layer_ids)
        self._left, self._slot_bytes = most_bytes, 0
        # by document; hidden states are shifted, so the last slot of each is never read
        self.known: dict[bytes, States] = {}
        # what an earlier process had kept, and the pack to recompute it from
        self._lost: dict[bytes, Callable[[], TokenBatch]] = {}

    @cached_property
    def _device(self) -> torch.device:
        """The device of the answers. Looking it up in a large model takes a millisecond a step."""
        return self.get_input_embeddings().weight.device

    def close(self) -> None:
        self.known.clear()
        self._lost.clear()
        super().close()

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        self._check_open()
        spans = _spans(rows)
        if spans is None:  # padded rows are not looked up: packs of one document do the same
            return self.inner.answer(rows)
        if not spans or any(self._is_new(key) for _, key in spans):
            batch = self.inner.answer(rows)
            states = self._states(batch)
            for span, key in spans:
                if self._is_new(key) and self._fits(span):
                    self._keep(key, span, states)
            return batch
        for _, key in spans:
            if key in self._lost:
                self._recompute(self._lost[key])
        return self._recall(rows, spans)

    @torch.no_grad()
    def asked_before(self, packs: Iterable[Callable[[], TokenBatch]]) -> None:
        """Reserve memory for every document that was kept then, in the same order: where not all
        of them fit, the same ones do. Their states are recomputed when they are next needed."""
        for pack in packs:
            rows = pack()
            new = [(span, key) for span, key in _spans(rows) or [] if self._is_new(key)]
            if new and not self._slot_bytes:
                self._states(self.inner.answer(rows))
            for span, key in new:
                if self._is_new(key) and self._fits(span):
                    self._lost[key] = pack

    def _is_new(self, key: bytes) -> bool:
        return key not in self.known and key not in self._lost

    def _fits(self, span: slice) -> bool:
        """Whether there is memory for these slots, which are then taken from it."""
        needed: int = (span.stop - span.start) * self._slot_bytes
        fits = needed <= self._left
        self._left -= needed if fits else 0
        return fits

    def _states(self, batch: Eagle3TargetBatch) -> States:
        """An answer's states, one row for each slot of the flattened batch."""
        assert batch.last_hidden_states is not None
        states = batch.aux_hidden_states.flatten(0, 1), batch.last_hidden_states.flatten(0, 1)
        self._slot_bytes = sum(part[0].nbytes for part in states)
        return states

    def _keep(self, key: bytes, span: slice, states: States) -> None:
        aux_ND, hidden_ND = states
        self.known[key] = aux_ND[span].clone(), hidden_ND[span].clone()

    def _recompute(self, pack: Callable[[], TokenBatch]) -> None:
        """Recompute the documents that were first answered in this pack."""
        rows = pack()
        states = self._states(self.inner.answer(rows))
        for span, key in _spans(rows) or []:
            if self._lost.get(key) is pack:
                del self._lost[key]
                self._keep(key, span, states)

    def _recall(self, rows: TokenBatch, spans: list[Span]) -> Eagle3TargetBatch:
        flat = [
            part.new_zeros((rows.tokens, part.shape[-1]), device=self._device)
            for part in self.known[spans[0][1]]
        ]
        into = [part[span] for span, _ in spans for part in flat]
        kept = [part for _, key in spans for part in self.known[key]]
        torch._foreach_copy_(into, kept)  # a few launches
        aux, hidden = (part.view(*rows.shape, -1) for part in flat)
        return Eagle3TargetBatch.about(
            rows, aux_hidden_states=aux, last_hidden_states=hidden, shifted=True
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
    flat = rows.input_ids.flatten().cpu().numpy()
    places = zip(documents.starts, documents.lengths, strict=True)
    spans = [slice(start, start + length) for start, length in places]
    return [(s, hashlib.blake2b(flat[s].tobytes(), digest_size=16).digest()) for s in spans]
