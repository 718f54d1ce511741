"""Remembered states equal what the target would answer again, wherever they are kept."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from contract import assert_same
from hypothesis import given
from hypothesis import strategies as st

from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import prepare_rows
from fledge.target import state_cache as kept_module
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.state_cache import KeptStates, Memory, RememberingTarget, copy_all, find_memory

KEPT = {
    "device": KeptStates(2**30),
    "host": KeptStates(0, 2**30),
    "both": KeptStates(20_000, 2**30),
}


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


@pytest.mark.parametrize("place", KEPT)
def test_a_remembering_target_answers_as_the_target_does(counting, place):
    remembering = RememberingTarget(counting.target, KEPT[place])
    for epoch in range(3):
        for batch in counting.packs(epoch):
            actual, expected = remembering.answer(batch), counting.answer(batch)
            read = batch.doc_remaining > 0  # what a trainer may read
            assert_same(actual, expected, read, rtol=1e-7, atol=1e-7)
        if epoch == 0:
            first_epoch_calls = counting.calls
    assert counting.calls == first_epoch_calls  # later epochs did not ask the target


def test_without_room_the_target_is_asked_again_and_bad_rows_are_refused(counting):
    forgetful = RememberingTarget(counting.target, KeptStates())
    batch = next(counting.packs(0))
    for count in (1, 2):
        forgetful.answer(batch)
        assert counting.calls == count
    with pytest.raises(ValueError, match="no token at all"):
        forgetful.answer(replace(batch, attention_mask=torch.zeros_like(batch.attention_mask)))


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    budgets=st.tuples(st.integers(0, 600), st.integers(0, 600)),
    block=st.sampled_from([64, 100, 256]),
)
def test_stored_tensors_are_intact_and_no_budget_is_exceeded(lengths, budgets, block):
    """Parts of 4 x 2 and 4 x 1 bytes a row; nothing overlaps, and only a full memory refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_module, "_BLOCK", block)
        memories = [Memory(budgets[0]), Memory(budgets[1], on_host=True)]
        stored = []
        for number, length in enumerate(lengths):
            parts = (torch.full((length, 2), float(number)), torch.full((length, 1), float(number)))
            room = find_memory(memories, parts)
            if room is None:
                assert all(memory._left < 12 * length for memory in memories)
            else:
                copy_all(zip(room, parts, strict=True))
                stored.append((room, parts))
    for room, parts in stored:
        assert all(torch.equal(a, b) for a, b in zip(room, parts, strict=True))
    assert 12 * sum(len(parts[0]) for _, parts in stored) <= sum(budgets)


def test_no_more_states_are_kept_once_memory_runs_out(counting, monkeypatch, caplog):
    """The budget is the user's choice; the machine may have less memory."""

    def refuse(*_):
        raise RuntimeError("out of memory\nand a trace")

    remembering = RememberingTarget(counting.target, KeptStates(2**30))
    monkeypatch.setattr(Memory, "_allocate", refuse)
    for count, batch in enumerate(counting.packs(0), start=1):
        assert torch.equal(remembering.answer(batch).input_ids, counting.answer(batch).input_ids)
        assert counting.calls == count
    assert [record.getMessage() for record in caplog.records] == [
        "no more states are kept: out of memory"
    ]


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


ROOMS = {
    "all fit": KeptStates(2**30),
    "some fit": KeptStates(ROWS_KEPT),
    "on device and host": KeptStates(ROWS_KEPT // 4, ROWS_KEPT // 4),
    "none fit": KeptStates(),
}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("stopped", ["in the first epoch", "between", "in the second"])
def test_a_resumed_target_answers_as_the_uninterrupted_one(
    tiny_target, tiny_chats, monkeypatch, room, stopped
):
    """Bit for bit, although each pack rounds differently and not every document is kept."""
    monkeypatch.setattr(kept_module, "_BLOCK", 4_000)
    counting = RoundsByPack(tiny_target, tiny_chats)
    epochs = [list(counting.packs(epoch)) for epoch in range(3)]
    packs = [*epochs[0][-2:], *epochs[0], *epochs[1], *epochs[2]]  # held-out ones come first
    first = 2 + len(epochs[0])
    cut = {"in the first epoch": first - 3, "between": first, "in the second": first + 4}[stopped]
    whole, resumed = (RememberingTarget(counting.target, room) for _ in range(2))
    for batch in packs[:cut]:
        whole.answer(batch)
    resumed.asked_before(partial(packs.__getitem__, index) for index in range(min(cut, first)))
    for batch in packs[cut:]:
        before = counting.calls
        expected = whole.answer(batch)
        from_memory = counting.calls == before
        read = batch.doc_remaining > 0 if from_memory else ...  # what a trainer may read
        assert_same(resumed.answer(batch), expected, read)
    assert whole.known.keys() == {*resumed.known, *resumed._reserved}
    if room.device_bytes == ROWS_KEPT:
        assert 0 < len(whole.known) < len(counting.rows)


def test_lost_documents_are_recomputed_once_and_only_when_needed(tiny_target, tiny_chats):
    counting = RoundsByPack(tiny_target, tiny_chats)
    first, second = list(counting.packs(0)), list(counting.packs(1))
    target = RememberingTarget(counting.target, KeptStates(2**30))
    target.asked_before(partial(first.__getitem__, index) for index in range(len(first)))
    assert counting.calls == 1  # to learn the shapes
    target.answer(first[3])
    assert counting.calls == 2
    for batch in second:
        target.answer(batch)
    assert counting.calls == 1 + len(first)
