"""Remembered states equal what the target would answer again, wherever they are kept."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from contract import assert_same

from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import prepare_rows
from fledge.target import state_cache
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.state_cache import RememberingTarget


class CountingTarget:
    """Packs of the tiny chats, and a target that counts its calls."""

    def __init__(self, model, chats):
        self.rows = prepare_rows([str(chats)], model, workers=1)
        self.target = HFEagle3TargetModel.from_pretrained(
            model, aux_layer_ids=[0, 1, 2], dtype=torch.float64, device="cpu"
        )
        self.calls, self.answer = 0, self.target.answer
        self.target.answer = self._answer

    def _answer(self, rows):
        self.calls += 1
        return self.answer(rows)

    def packs(self, epoch):
        for pack in pack_rows(self.rows.lengths, 200, epoch=epoch).packs:
            yield collate(self.rows, [pack], 200, 0)


@pytest.fixture
def counting(tiny_target, tiny_chats):
    return CountingTarget(tiny_target, tiny_chats)


def test_a_remembering_target_answers_as_the_target_does(counting):
    remembering = RememberingTarget(counting.target, 2**30)
    for epoch in range(3):
        for batch in counting.packs(epoch):
            actual, expected = remembering.answer(batch), counting.answer(batch)
            read = batch.doc_remaining > 0  # what a trainer may read
            assert_same(actual, expected, read, rtol=1e-7, atol=1e-7)
        if epoch == 0:
            first_epoch_calls = counting.calls
    assert counting.calls == first_epoch_calls  # later epochs did not ask the target


def test_coverage_is_kept_with_the_states(counting, monkeypatch):
    """It is what an objective computes from them, and the whole head is not asked for it again."""
    remembering = RememberingTarget(counting.target, 2**30)
    head, member_V = remembering.info().head, torch.arange(400) % 3 > 0
    remembering.keep_coverage(member_V)
    for epoch in range(2):
        for rows in counting.packs(epoch):
            batch = remembering.answer(rows)
            expected = member_V[head.logits(batch.last_hidden_states).argmax(-1)]
            supervised = batch.loss_mask.bool() & (batch.doc_remaining > 0)
            assert 0 < expected[supervised].sum() < supervised.sum()
            assert torch.equal(batch.covered[..., 0][supervised], expected[supervised])
        monkeypatch.setattr(state_cache, "top_tokens", None)
    for other in (member_V.logical_not(), torch.ones_like(member_V)):  # kept for neither of them
        remembering.keep_coverage(other)
        assert remembering.answer(next(counting.packs(0))).covered is None


def test_documents_are_told_apart_by_their_masks(counting):
    remembering = RememberingTarget(counting.target, 2**30)
    remembering.keep_coverage(torch.arange(400) % 3 > 0)
    rows = next(counting.packs(0))
    some = replace(rows, loss_mask=rows.loss_mask * (torch.arange(200) % 2))
    few, all_of_them = (int(remembering.answer(asked).covered.sum()) for asked in (some, rows))
    assert few < all_of_them


def test_without_room_the_target_is_asked_again_and_bad_rows_are_refused(counting):
    forgetful = RememberingTarget(counting.target, 0)
    batch = next(counting.packs(0))
    for count in (1, 2):
        forgetful.answer(batch)
        assert counting.calls == count
    with pytest.raises(ValueError, match="no token at all"):
        forgetful.answer(replace(batch, attention_mask=torch.zeros_like(batch.attention_mask)))


class RoundsByPack(CountingTarget):
    """A target whose states are rounded differently in every pack."""

    def _answer(self, rows):
        batch = super()._answer(rows)
        rounding = 1 + 1e-6 * (int(rows.input_ids.sum()) % 997)
        return replace(
            batch,
            aux_hidden_states=batch.aux_hidden_states * rounding,
            last_hidden_states=batch.last_hidden_states * rounding,
        )


ROWS_KEPT = 40_000  # bytes: some of the documents, not all


ROOMS = {"all fit": 2**30, "some fit": ROWS_KEPT, "none fit": 0}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("stopped", ["in the first epoch", "between", "in the second"])
def test_a_resumed_target_answers_as_the_uninterrupted_one(tiny_target, tiny_chats, room, stopped):
    """Bit for bit, although each pack rounds differently and not every document is kept."""
    counting = RoundsByPack(tiny_target, tiny_chats)
    epochs = [list(counting.packs(epoch)) for epoch in range(3)]
    packs = [*epochs[0][-2:], *epochs[0], *epochs[1], *epochs[2]]  # held-out ones come first
    first = 2 + len(epochs[0])
    cut = {"in the first epoch": first - 3, "between": first, "in the second": first + 4}[stopped]
    whole, resumed = (RememberingTarget(counting.target, room) for _ in range(2))
    for target in (whole, resumed):
        target.keep_coverage(torch.arange(400) % 3 > 0)
    for batch in packs[:cut]:
        whole.answer(batch)
    resumed.asked_before(partial(packs.__getitem__, index) for index in range(min(cut, first)))
    for batch in packs[cut:]:
        before = counting.calls
        expected = whole.answer(batch)
        from_memory = counting.calls == before
        read = batch.doc_remaining > 0 if from_memory else ...  # what a trainer may read
        assert_same(resumed.answer(batch), expected, read)
    assert whole.known.keys() == {*resumed.known, *resumed._lost}
    if room == ROWS_KEPT:
        assert 0 < len(whole.known) < len(counting.rows)


def test_lost_documents_are_recomputed_once_and_only_when_needed(tiny_target, tiny_chats):
    counting = RoundsByPack(tiny_target, tiny_chats)
    first, second = list(counting.packs(0)), list(counting.packs(1))
    target = RememberingTarget(counting.target, 2**30)
    target.asked_before(partial(first.__getitem__, index) for index in range(len(first)))
    assert counting.calls == 1  # to learn the shapes
    target.answer(first[3])
    assert counting.calls == 2
    for batch in second:
        target.answer(batch)
    assert counting.calls == 1 + len(first)
