"""A target that remembers: states of documents seen before come from memory, not from a forward.

The frozen target gives the same answers in every epoch. Where its forward is the larger half of a
step (a laptop CPU), later epochs only pay for the draft.

Which pack a document was first answered in decides how its states are rounded, because matrix
products of other shapes round differently. A resumed run has lost the states of the epochs before,
so it recomputes each document in that same first pack (`asked_before`), and continues bit for bit.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import top_tokens
from fledge.core.rows import TokenBatch, shift_left
from fledge.core.transfer import send
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
        self._member_V: Tensor | None = None  # the draft vocabulary whose coverage is kept
        self._covered: dict[bytes, Tensor] = {}  # [n, 1] bool, by document

    @cached_property
    def _device(self) -> torch.device:
        """The device of the answers. Looking it up in a large model takes a millisecond a step."""
        return self.get_input_embeddings().weight.device

    def keep_coverage(self, selected_token_mask: Tensor) -> None:
        """The whole vocabulary is then swept when a document is kept, and not in every epoch."""
        self._covered.clear()
        is_partial = not bool(selected_token_mask.all())
        self._member_V = selected_token_mask.to(self._device) if is_partial else None

    def close(self) -> None:
        self.known.clear()
        self._covered.clear()
        self._lost.clear()
        super().close()

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        self._check_open()
        spans = _spans(rows)
        if spans is None:  # padded rows are not looked up: packs of one document do the same
            return self.inner.answer(rows)
        if not spans or any(self._is_new(key) for _, key in spans):
            batch = self._ask(rows)
            for span, key in spans:
                if self._is_new(key) and self._fits(span):
                    self._keep(key, span, batch)
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
                self._ask(rows)
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

    def _ask(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """The inner target's answer, with coverage if that is kept."""
        batch = self.inner.answer(rows)
        aux_SD, hidden_SD = _states(batch)
        self._slot_bytes = aux_SD[0].nbytes + hidden_SD[0].nbytes
        if self._member_V is None:
            return batch
        supervised = shift_left(rows.loss_mask).flatten().cpu().nonzero()[:, 0]
        slot_M = send(supervised, hidden_SD.device)
        covered_M = self._member_V[top_tokens(self.inner.info().head, hidden_SD, slot_M)]
        covered_S = covered_M.new_zeros(rows.tokens).index_copy_(0, slot_M, covered_M)
        return replace(batch, covered=covered_S.view(*rows.shape, 1))

    def _keep(self, key: bytes, span: slice, batch: Eagle3TargetBatch) -> None:
        aux_SD, hidden_SD = _states(batch)
        self.known[key] = aux_SD[span].clone(), hidden_SD[span].clone()
        if batch.covered is not None:
            self._covered[key] = batch.covered.flatten(0, 1)[span].clone()

    def _recompute(self, pack: Callable[[], TokenBatch]) -> None:
        """Recompute the documents that were first answered in this pack."""
        rows = pack()
        batch = self._ask(rows)
        for span, key in _spans(rows) or []:
            if self._lost.get(key) is pack:
                del self._lost[key]
                self._keep(key, span, batch)

    def _recall(self, rows: TokenBatch, spans: list[Span]) -> Eagle3TargetBatch:
        keys = [key for _, key in spans]
        states = [self.known[key] for key in keys]
        aux, hidden = (self._gather(rows, spans, parts) for parts in zip(*states, strict=True))
        covered = None
        if all(key in self._covered for key in keys):
            covered = self._gather(rows, spans, [self._covered[key] for key in keys])
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=aux,
            last_hidden_states=hidden,
            covered=covered,
            shifted=True,
        )

    def _gather(self, rows: TokenBatch, spans: list[Span], parts: Sequence[Tensor]) -> Tensor:
        """[B, T, ...]: the parts of a batch's documents, each in its place, in a few launches."""
        flat = parts[0].new_zeros((rows.tokens, parts[0].shape[-1]), device=self._device)
        torch._foreach_copy_([flat[span] for span, _ in spans], list(parts))
        return flat.view(*rows.shape, -1)


def _states(batch: Eagle3TargetBatch) -> States:
    """An answer's states, one row for each slot of the flattened batch."""
    assert batch.last_hidden_states is not None
    return batch.aux_hidden_states.flatten(0, 1), batch.last_hidden_states.flatten(0, 1)


def colocated(target: Eagle3TargetBackend) -> HFEagle3TargetModel | None:
    """The Hugging Face target behind a backend, remembered or not; None: it runs elsewhere."""
    inner = target.inner if isinstance(target, RememberingTarget) else target
    return inner if isinstance(inner, HFEagle3TargetModel) else None


def _spans(rows: TokenBatch) -> list[Span] | None:
    """The documents of packed rows, known by tokens and mask; None when the rows are padded."""
    documents = find_documents(rows)
    if documents is None:
        return None
    text = torch.stack([rows.input_ids, rows.loss_mask.to(rows.input_ids.dtype)], dim=-1)
    flat = text.flatten(0, 1).cpu().numpy()
    places = zip(documents.starts, documents.lengths, strict=True)
    spans = [slice(start, start + length) for start, length in places]
    return [(s, hashlib.blake2b(flat[s].tobytes(), digest_size=16).digest()) for s in spans]
