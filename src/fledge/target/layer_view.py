"""A view of some aux layers of a target that returns more layers than one draft uses, so that one
forward pass serves several drafts (`train/several_drafts.py`)."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.data.rows import KnownRows, RowView
from fledge.target.base import Eagle3TargetBackend, HasWeight, TargetInfo
from fledge.target.finite import by_layer


class LayerView(Eagle3TargetBackend):
    """Some of the aux layers of another target, in any order. Closing the view leaves that target
    open for other drafts, unless the view is its `owner`."""

    def __init__(
        self, inner: Eagle3TargetBackend, aux_layer_ids: Sequence[int], *, owner: bool = False
    ) -> None:
        super().__init__(inner.supervision)
        missing = set(aux_layer_ids) - set(inner.aux_layer_ids)
        if missing:
            raise ValueError(f"layers {sorted(missing)} are not shown: {inner.aux_layer_ids}")
        self.inner, self.aux_layer_ids, self._owner = inner, list(aux_layer_ids), owner
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
        current = self.inner._selected_token_ids if self.supervision == "probs" else None
        if current is not None and not torch.equal(current.cpu(), selected_token_ids.cpu()):
            what = "probabilities are over one draft vocabulary, and the drafts have several"
            fix = "target.supervision=hidden, or the same draft.draft_vocab_size for all"
            raise BadInput(what, where="target.supervision", fix=fix)
        self.inner.set_vocab_mapping(selected_token_ids, selected_token_mask)

    def close(self) -> None:
        if self._owner:
            self.inner.close()
        super().close()

    def known_rows(self) -> KnownRows | None:
        return self.inner.known_rows()

    def read_ahead(self, rows: RowView) -> RowView:
        return self.inner.read_ahead(rows)

    def asked_before(self, packs: Iterable[Callable[[], TokenBatch]]) -> None:
        self.inner.asked_before(packs)


def behind_view(target: Eagle3TargetBackend) -> Eagle3TargetBackend:
    """The target behind a `LayerView`; any other target is returned as it is."""
    return target.inner if isinstance(target, LayerView) else target


def narrowed(
    answer: Eagle3TargetBatch, asked: Eagle3TargetBackend, target: Eagle3TargetBackend
) -> Eagle3TargetBatch:
    """The answer of the target `asked`, reduced to the layers of a draft's `target`: which is
    either `asked` itself or a view of it."""
    if target is asked:
        return answer
    assert isinstance(target, LayerView), "a draft whose target was not asked"
    assert target.inner is asked, "a draft whose target was not asked"
    return target.narrow(answer)
