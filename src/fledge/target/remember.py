"""A target that remembers: states of documents seen before come from memory, not from a forward.

The frozen target says the same about a document in every epoch. On a machine where its forward is
the larger half of a step (a laptop CPU), later epochs then cost the draft alone. The offline cache
is the same idea on disk.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch, _shift_left_with_zero
from fledge.core.transfer import send
from fledge.target.base import Eagle3TargetBackend, HasWeight, TargetInfo
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.packing import find_documents


@dataclass(frozen=True)
class _Memory:
    """One document's answer [n, ...]; supervision is kept shifted, its last slot is never read."""

    aux: Tensor
    hidden: Tensor


class RememberingTarget(Eagle3TargetBackend):
    """Wraps a backend with `hidden` supervision; holds at most `max_bytes` of states."""

    def __init__(self, inner: Eagle3TargetBackend, max_bytes: int) -> None:
        super().__init__("hidden")
        if inner.supervision != "hidden":
            raise ValueError(f"only hidden supervision is remembered, not {inner.supervision!r}")
        self.inner, self.aux_layer_ids = inner, inner.aux_layer_ids
        self._free = max_bytes
        self._known: dict[bytes, _Memory] = {}

    def info(self) -> TargetInfo:
        return self.inner.info()

    def get_input_embeddings(self) -> HasWeight:
        return self.inner.get_input_embeddings()

    def close(self) -> None:
        self._known.clear()
        self.inner.close()
        super().close()

    @torch.no_grad()
    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Eagle3TargetBatch:
        self._check_open()
        packing = (position_ids, seq_lens, doc_remaining)
        documents = find_documents(input_ids, attention_mask, *packing)
        if documents is None:  # padded rows are not looked up: packs of one do the same
            return self.inner.generate_batch(input_ids, attention_mask, loss_mask, *packing)
        flat = input_ids.flatten()
        spans = [
            (slice(start, start + length), _key(flat[start : start + length]))
            for start, length in zip(documents.starts, documents.lengths, strict=True)
        ]
        if not spans or any(key not in self._known for _, key in spans):
            batch = self.inner.generate_batch(input_ids, attention_mask, loss_mask, *packing)
            self._learn(batch, spans)
            return batch
        return self._recall(input_ids, attention_mask, loss_mask, packing, spans)

    def _learn(self, batch: Eagle3TargetBatch, spans: list[tuple[slice, bytes]]) -> None:
        assert batch.last_hidden_states is not None
        aux = batch.aux_hidden_states.flatten(0, 1)
        hidden = batch.last_hidden_states.flatten(0, 1)
        for span, key in spans:
            size = aux[span].nbytes + hidden[span].nbytes
            if key not in self._known and size <= self._free:
                self._known[key] = _Memory(aux[span].clone(), hidden[span].clone())
                self._free -= size

    def _recall(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        packing: tuple[Tensor | None, Tensor | None, Tensor | None],
        spans: list[tuple[slice, bytes]],
    ) -> Eagle3TargetBatch:
        some = self._known[spans[0][1]]
        rows = input_ids.shape[0] * input_ids.shape[1]
        aux = some.aux.new_zeros((rows, some.aux.shape[-1]))
        hidden = some.hidden.new_zeros((rows, some.hidden.shape[-1]))
        for span, key in spans:
            aux[span], hidden[span] = self._known[key].aux, self._known[key].hidden
        device = aux.device
        position_ids, seq_lens, doc_remaining = (
            None if tensor is None else send(tensor, device) for tensor in packing
        )
        return Eagle3TargetBatch(
            aux_hidden_states=aux.view(*input_ids.shape, -1),
            input_ids=_shift_left_with_zero(send(input_ids, device)),
            attention_mask=send(attention_mask, device),
            loss_mask=_shift_left_with_zero(send(loss_mask, device)),
            last_hidden_states=hidden.view(*input_ids.shape, -1),
            position_ids=position_ids,
            seq_lens=seq_lens,
            doc_remaining=doc_remaining,
        )


def colocated(target: Eagle3TargetBackend) -> HFEagle3TargetModel | None:
    """The Hugging Face target behind a backend, remembered or not; None: it runs elsewhere."""
    inner = target.inner if isinstance(target, RememberingTarget) else target
    return inner if isinstance(inner, HFEagle3TargetModel) else None


def _key(ids: Tensor) -> bytes:
    return hashlib.blake2b(ids.cpu().numpy().tobytes(), digest_size=16).digest()
