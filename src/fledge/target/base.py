"""The interface of every target backend, static facts about a target, a view of some layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, get_args

import torch
from torch import Tensor, nn

from fledge.core.batch import SUPERVISIONS, Eagle3TargetBatch, Supervision
from fledge.core.errors import BadInput, nearest
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.data.rows import KnownRows, RowView
from fledge.data.vocab import DraftVocabulary
from fledge.target.layers import FinalNorm


class HasWeight(Protocol):
    """The only part of the target's input embedding that a draft reads."""

    @property
    def weight(self) -> Tensor: ...


@dataclass(frozen=True)
class InputEmbedding:
    """The input embedding's weight [V, D] of a target that exposes no embedding module."""

    weight: Tensor


@dataclass(frozen=True)
class TargetInfo:
    """Static facts about a target that trainers, caches and servers need."""

    head: TargetHead
    final_norm: FinalNorm | None
    hidden_size: int
    vocab_size: int  # rows of the head; the tokenizer may have fewer tokens
    depth: int  # number of decoder layers
    dtype: torch.dtype  # of the returned states
    weight_dtypes: str  # share of the weights by dtype
    weights_fingerprint: str
    tokenizer_fingerprint: str | None
    module: nn.Module | None = None  # the model itself, if it is in this process
    vocabulary: DraftVocabulary | None = None  # set if its answers cover only this vocabulary
    suggested: DraftVocabulary | None = None  # used unless the recipe sets another size


class Eagle3TargetBackend(ABC):
    """A frozen target that turns token rows into supervision.

    Every backend takes the same rows and returns the same batch, packed or padded, in the encoding
    it was built for; `tests/target/contract.py` enforces this. A backend implements `answer` or
    `generate_batch` with its six arguments: each defaults to calling the other.
    """

    aux_layer_ids: list[int]
    supervision: Supervision = "logits"
    supports_async: bool = False  # whether answer_async really overlaps with the caller
    prefetch: int = 0  # how many batches a trainer should request in advance, if async
    inside_engine: bool = False  # nothing to compile here, and weights may be in another process
    askers: int = 1  # ranks that each ask about the same rows
    joins: bool = False  # ranks share its work: when one asks, all others must ask or `join`
    _selected_token_ids: Tensor | None = None
    _selected_token_mask: Tensor | None = None
    _closed = False

    def __new__(cls, *_: Any, **__: Any) -> Self:
        backend, base = super().__new__(cls), Eagle3TargetBackend
        if cls.answer is base.answer and cls.generate_batch is base.generate_batch:
            what = "it has neither answer(rows) nor generate_batch with its six arguments"
            raise TypeError(f"{cls.__name__} cannot answer: {what}")
        return backend

    def __init__(self, supervision: Supervision = "logits") -> None:
        if supervision not in get_args(Supervision):
            fix = nearest(str(supervision), list(SUPERVISIONS))
            raise BadInput(f"supervision {supervision!r} is not an encoding", fix=fix)
        self.supervision = supervision

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Run the target once over these rows, which may be on any device."""
        return self.generate_batch(*rows.arguments())

    def features(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """`answer` for an objective that reads only the aux states: a target that can stop after
        the last aux layer does so, and its supervision is zeros."""
        return self.answer(rows)

    def join(self) -> None:
        """Take part in the other ranks' answers without rows of this rank's own. Does nothing
        unless the target `joins`."""
        self._check_open()

    def answer_async(self, rows: TokenBatch) -> Future[Eagle3TargetBatch]:
        """`answer` as a future, already completed unless the backend `supports_async`."""
        return finished(self.answer(rows))

    def generate_batch(
        self,
        input_ids: Tensor,  # [B, T]
        attention_mask: Tensor,  # [B, T]
        loss_mask: Tensor,  # [B, T]
        position_ids: Tensor | None = None,  # [B, T]
        seq_lens: Tensor | None = None,  # [B, max_docs]
        doc_remaining: Tensor | None = None,  # [B, T]
    ) -> Eagle3TargetBatch:
        """`answer` for callers that have the tensors of a `TokenBatch` but not the batch."""
        packing = (position_ids, seq_lens, doc_remaining)
        return self.answer(TokenBatch(input_ids, attention_mask, loss_mask, *packing))

    def generate_batch_async(self, *rows: Any, **more: Any) -> Future[Eagle3TargetBatch]:
        """`answer_async`, from the same six tensors."""
        return self.answer_async(TokenBatch(*rows, **more))

    @abstractmethod
    def get_input_embeddings(self) -> HasWeight:
        """The target's input embedding: anything with a `.weight` [V, D]."""

    def info(self) -> TargetInfo:
        """Head, sizes, dtype and fingerprints, computed once. Optional for a backend that answers
        with logits: only `hidden` supervision, caches and servers need the head."""
        what = f"{type(self).__name__} does not describe its target's head"
        raise BadInput(what, fix="use supervision 'logits', or give the backend an info()")

    def set_vocab_mapping(
        self, selected_token_ids: Tensor, selected_token_mask: Tensor | None = None
    ) -> None:
        """Set the draft vocabulary, which `probs` supervision needs: ids [W] in draft order, and
        their mask [V] (derived from the ids if omitted)."""
        ids, mask = selected_token_ids, selected_token_mask
        if mask is None:
            mask = selection_mask(ids, len(self.get_input_embeddings().weight))
        if int(mask.sum()) != len(ids):
            what = f"selected_token_mask marks {int(mask.sum())} tokens, and not the {len(ids)} of"
            raise ValueError(f"{what} selected_token_ids, each once")
        self._selected_token_ids, self._selected_token_mask = ids, mask.bool()

    def keep_coverage(self, selected_token_mask: Tensor) -> None:
        """An objective asks whether the target's top token is in this vocabulary [V]: a target that
        remembers its answers may remember that too (`covered`)."""
        self._check_open()

    def known_rows(self) -> KnownRows | None:
        """The only rows that it can be asked about, or None if it answers about any rows."""
        return None

    def read_ahead(self, rows: RowView) -> RowView:
        """The same rows as a view whose collation may prefetch their answers."""
        return rows

    def asked_before(self, packs: Iterable[Callable[[], TokenBatch]]) -> None:
        """A resumed run calls this with the packs that its earlier process asked about, in order.
        Nothing to do unless earlier questions decide how later ones are answered."""
        self._check_open()

    def close(self) -> None:
        """Release the target. A second call does nothing; any other call then raises."""
        self._closed = True

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: build a new one")

    def _vocab_mapping(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The draft vocabulary, moved to `device` on first use."""
        if self._selected_token_ids is None or self._selected_token_mask is None:
            what = "supervision 'probs' needs the draft vocabulary"
            raise ValueError(f"{what}: call set_vocab_mapping first")
        self._selected_token_ids = self._selected_token_ids.to(device)
        self._selected_token_mask = self._selected_token_mask.to(device)
        return self._selected_token_ids, self._selected_token_mask


def finished(batch: Eagle3TargetBatch) -> Future[Eagle3TargetBatch]:
    """Wrap an answer in a completed future."""
    future: Future[Eagle3TargetBatch] = Future()
    future.set_result(batch)
    return future


def selection_mask(selected_token_ids: Tensor, vocab_size: int) -> Tensor:
    """The membership mask [V] of the draft vocabulary's ids [W]."""
    ids = selected_token_ids
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"{ids.dtype} {list(ids.shape)}"
        raise ValueError(f"selected_token_ids must be one row of integers, got {got}")
    ids = ids.long()
    if len(outside := ids[(ids < 0) | (ids >= vocab_size)]):
        known = f"the target knows 0 .. {vocab_size - 1}"
        raise ValueError(f"selected_token_ids hold {int(outside[0])}, {known}")
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)


def check_token_ids(input_ids: Tensor, size: int) -> None:
    """Reject ids that the target's embedding has no row for."""
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= size:
        what = f"input_ids hold {low if low < 0 else high}, the target knows 0 .. {size - 1}"
        raise ValueError(f"{what}: was another tokenizer used?")


def by_layer(aux: Tensor, layers: int) -> Tensor:
    """[..., A * D] -> [..., A, D]"""
    return aux.reshape(*aux.shape[:-1], layers, aux.shape[-1] // layers)


class WrappedTarget(Eagle3TargetBackend):
    """A target that changes another one's answers; it owns and closes that target."""

    def __init__(self, inner: Eagle3TargetBackend, aux_layer_ids: Sequence[int]) -> None:
        super().__init__(inner.supervision)
        self.inner, self.aux_layer_ids = inner, list(aux_layer_ids)

    def join(self) -> None:
        self.inner.join()

    def info(self) -> TargetInfo:
        self._check_open()
        return self.inner.info()

    def get_input_embeddings(self) -> HasWeight:
        self._check_open()
        return self.inner.get_input_embeddings()

    def set_vocab_mapping(
        self, selected_token_ids: Tensor, selected_token_mask: Tensor | None = None
    ) -> None:
        self.inner.set_vocab_mapping(selected_token_ids, selected_token_mask)

    def keep_coverage(self, selected_token_mask: Tensor) -> None:
        self.inner.keep_coverage(selected_token_mask)

    def known_rows(self) -> KnownRows | None:
        return self.inner.known_rows()

    def read_ahead(self, rows: RowView) -> RowView:
        return self.inner.read_ahead(rows)

    def asked_before(self, packs: Iterable[Callable[[], TokenBatch]]) -> None:
        self.inner.asked_before(packs)

    def close(self) -> None:
        self.inner.close()
        super().close()


class LayerView(WrappedTarget):
    """Some of the aux layers of another target, in any order."""

    def __init__(self, inner: Eagle3TargetBackend, aux_layer_ids: Sequence[int]) -> None:
        super().__init__(inner, aux_layer_ids)
        if missing := set(aux_layer_ids) - set(inner.aux_layer_ids):
            raise ValueError(f"layers {sorted(missing)} are not shown: {inner.aux_layer_ids}")
        self.supports_async, self.prefetch = inner.supports_async, inner.prefetch
        self.inside_engine, self.joins = inner.inside_engine, inner.joins

    def narrow(self, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
        """Reduce the inner target's answer to the aux layers of this view."""
        all_ids = self.inner.aux_layer_ids
        if self.aux_layer_ids == all_ids:
            return answer
        aux_BTAD = by_layer(answer.aux_hidden_states, len(all_ids))
        # an index tensor would have to be copied to the device, which waits for the target's pass
        states = [aux_BTAD[:, :, all_ids.index(i)] for i in self.aux_layer_ids]
        return replace(answer, aux_hidden_states=torch.cat(states, dim=-1))

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        self._check_open()
        return self.narrow(self.inner.answer(rows))

    def answer_async(self, rows: TokenBatch) -> Future[Eagle3TargetBatch]:
        self._check_open()
        future: Future[Eagle3TargetBatch] = Future()

        def pass_on(done: Future[Eagle3TargetBatch]) -> None:
            if not future.set_running_or_notify_cancel():
                return  # canceled meanwhile: nobody waits for it
            try:
                future.set_result(self.narrow(done.result()))
            except BaseException as error:  # noqa: BLE001  (raised where the answer is awaited)
                future.set_exception(error)

        self.inner.answer_async(rows).add_done_callback(pass_on)
        return future
