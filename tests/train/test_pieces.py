"""Parts of the training loop on their own: data order, schedule, step guard, optimizer."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fledge.core.distributed import World
from fledge.core.rows import TokenRow
from fledge.data import pack as pack_module
from fledge.data.rows import Block, split_rows
from fledge.data.vocab import count_supervised
from fledge.training.batches import PackStream
from fledge.training.optimizer import (
    GUARD_WARMUP,
    StepGuard,
    clip_gradients,
    learning_rate,
    make_optimizers,
)


class Rows(list):
    """Rows in memory, with the `lengths` that a stream reads."""

    def __init__(self, sizes):
        super().__init__(
            TokenRow(np.full(n, i + 1, np.int32), np.ones(n, np.uint8), f"row{i // 2}", i % 3 == 0)
            for i, n in enumerate(sizes)
        )
        self.lengths = np.array(sizes, dtype=np.int64)


sizes = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def documents(batches):
    """The rows in a list of step batches, sorted, with repetitions."""
    numbers = []
    for batch in batches:
        for micro in batch.micro:
            for row in micro.input_ids if micro is not None else []:
                ids = row[row > 0]
                numbers += ids.unique_consecutive().tolist()
    return sorted(numbers)


@settings(deadline=None, max_examples=40)
@given(
    sizes=sizes,
    micro=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    epochs=st.integers(1, 3),
    world=st.integers(1, 3),
)
def test_each_document_comes_once_per_epoch_over_all_ranks(sizes, micro, accumulate, epochs, world):
    rows = Rows(sizes)

    def stream(rank, size):
        return PackStream(
            rows, tokens=24, pad_id=0, seed=3, micro_batch=micro, accumulate=accumulate,
            epochs=epochs, world=World(rank, size),
        )  # fmt: skip

    streams = [stream(rank, world) for rank in range(world)]
    batches = [s.batch(step) for s in streams for step in range(s.steps)]
    assert documents(batches) == sorted(list(range(1, len(sizes) + 1)) * epochs)


def test_any_step_can_be_requested_and_prefetching_changes_nothing():
    rows = Rows([5, 9, 12, 3, 8, 20, 1, 7] * 4)
    plain = PackStream(rows, tokens=24, pad_id=0, seed=1, epochs=2)
    ahead = PackStream(rows, tokens=24, pad_id=0, seed=1, epochs=2)
    for step, batch in enumerate(ahead.prefetched(3, 2), start=3):
        assert torch.equal(batch.micro[0].input_ids, plain.batch(step).micro[0].input_ids)
    assert step == plain.steps - 1


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=40),
    window=st.integers(2, 16),
    padded=st.booleans(),
    ranks=st.integers(1, 3),
    data=st.data(),
)
def test_any_ranks_resumed_at_any_step_take_the_packs_of_one_rank(
    sizes, window, padded, ranks, data
):
    """The order depends on seed, epoch and data alone."""

    def stream(rank=0, size=1, micro=1):
        return PackStream(
            Rows(sizes), tokens=24, pad_id=0, seed=3, padded=padded, micro_batch=micro, epochs=4,
            world=World(rank, size),
        )  # fmt: skip

    def rows(batch):
        return [] if batch.micro[0] is None else batch.micro[0].input_ids.tolist()

    with patch.object(pack_module, "WINDOW", window):
        alone = stream()
        expected = [rows(alone.batch(step)) for step in range(alone.steps)]
        together = [stream(rank, ranks) for rank in range(ranks)]
        first = data.draw(st.integers(0, together[0].steps - 1), label="resumed at")
        for step in range(first, together[0].steps):
            taken = [row for rank in together for row in rows(rank.batch(step))]
            whole = [row for packs in expected[step * ranks : (step + 1) * ranks] for row in packs]
            assert taken == whole


def test_an_error_in_the_thread_is_raised_where_the_batch_is_awaited():
    rows = Rows([5, 9, 12, 3, 8, 20, 1, 7])
    stream = PackStream(rows, tokens=24, pad_id=0, seed=1, epochs=2)
    plain = stream.batch

    def batch(step):
        if step == 2:
            raise MemoryError("no room")  # any error: a thread that died silently hangs the run
        return plain(step)

    stream.batch = batch
    ahead = stream.prefetched(0, 2)
    assert [next(ahead).step, next(ahead).step] == [0, 1]
    with pytest.raises(MemoryError, match="no room"):
        next(ahead)


def test_a_micro_batch_larger_than_the_data_holds_all_of_it():
    rows = Rows([5, 9, 12, 3, 8, 20, 1, 7])
    huge = PackStream(rows, tokens=24, pad_id=0, seed=1, micro_batch=10**12)
    assert huge.steps == 1
    [batch] = huge.batch(0).micro
    assert len(batch.input_ids) == PackStream(rows, tokens=24, pad_id=0, seed=1).steps


def test_steps_beyond_the_epochs_continue_in_new_orders():
    rows = Rows([5, 9, 12, 3])
    stream = PackStream(rows, tokens=24, pad_id=0, seed=1, steps=50)
    assert stream.steps == 50
    assert stream.batch(49).epoch > 5


class BlockRows:
    """Rows that can only be read in blocks, and of which only `place` and `truncated` matter."""

    def __init__(self, places, truncated):
        self._rows = [
            TokenRow(np.full(2, i, np.int32), np.ones(2, np.uint8), place, is_cut)
            for i, (place, is_cut) in enumerate(zip(places, truncated, strict=True))
        ]
        self.lengths = np.full(len(places), 2)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        raise AssertionError("asked one by one")

    def blocks(self):
        for begin in range(0, len(self._rows), 7):
            yield Block.of(self._rows[begin : begin + 7])


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.text("a:19é\U0001f600", max_size=3), st.booleans()), max_size=60),
    requested=st.integers(0, 20),
    drop=st.booleans(),
)
def test_held_out_rows_follow_their_definition(rows, requested, drop):
    """They are drawn from the sorted places, so that existing runs keep their held-out rows."""
    places, truncated = [place for place, _ in rows], [end for _, end in rows]
    conversations = sorted(set(places))
    order = np.random.default_rng(0).permutation(len(conversations))
    requested = min(requested, max(0, len(conversations) - max(1, len(conversations) // 10)))
    chosen = {conversations[i] for i in order[:requested]}
    train, held_out = split_rows(BlockRows(places, truncated), requested, drop_truncated=drop)
    out = [i for i, place in enumerate(places) if place in chosen]
    kept = [i for i in range(len(rows)) if i not in out and not (drop and truncated[i])]
    assert (train._index.tolist(), held_out._index.tolist()) == (kept, out)
    counted = count_supervised(train.flat(), max(1, len(rows)))
    assert counted.tolist() == ([2 * (i in kept) for i in range(len(rows))] or [0])


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", {0: 0.2, 9: 2.0, 10: 2.0, 55: 2.0 * 0.55, 100: 0.2}),
        ("linear", {9: 2.0, 55: 2.0 * 0.55, 100: 0.2}),
        ("constant", {4: 1.0, 10: 2.0, 99: 2.0}),
        # 1 - sqrt over the last fifth
        ("wsd", {4: 1.0, 10: 2.0, 80: 2.0, 85: 2.0 * (0.1 + 0.9 * 0.5), 100: 0.2}),
    ],
)
def test_learning_rates(schedule, rates):
    for step, rate in rates.items():
        given = {"peak": 2.0, "warmup": 10, "schedule": schedule, "final_share": 0.1}
        assert learning_rate(step, 100, **given) == pytest.approx(rate)
    # a decay over all steps begins once the warm-up is over
    given = {"peak": 2.0, "warmup": 10, "schedule": "wsd", "final_share": 0.1, "decay_share": 1.0}
    assert learning_rate(10, 12, **given) == 2.0
    assert learning_rate(11, 12, **given) == pytest.approx(2.0 * (0.1 + 0.9 * (1 - 0.5**0.5)))


def test_guard_tells_spikes_from_slow_growth():
    guard = StepGuard(10.0, torch.device("cpu"))
    for i in range(GUARD_WARMUP + 5):
        assert not guard.judge(torch.tensor(1.0 + 0.1 * i))
    assert guard.judge(torch.tensor(50.0))
    assert guard.judge(torch.tensor(float("nan")))
    assert int(guard.bad_in_a_row) == 2
    assert not guard.judge(torch.tensor(3.0))
    assert int(guard.bad_in_a_row) == 0
    again = StepGuard(10.0, torch.device("cpu"))
    again.load({k: v.clone() for k, v in guard.state().items()})
    assert again.judge(torch.tensor(50.0))


@pytest.mark.parametrize("count", [0, 1, 2, 5, 64])
def test_guard_median_is_the_nanmedian(count):
    guard = StepGuard(10.0, torch.device("cpu"))
    torch.manual_seed(count)
    guard.norms[torch.randperm(64)[:count]] = torch.rand(count)
    torch.testing.assert_close(guard.median(), guard.norms.nanmedian(), equal_nan=True)


def test_a_skipped_step_changes_neither_weights_nor_moments():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    [optimizer] = make_optimizers(nn.ParameterList([weight]), lr=0.1, weight_decay=0.1)
    for bad in (0.0, 1.0, 0.0):
        before = weight.clone()
        moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
        weight.grad = torch.full((3, 3), float("nan") if bad else 1.0)
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
        after = [v for s in optimizer.state.values() for v in s.values()]
        if bad:
            assert torch.equal(weight, before)
            assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
        else:
            assert not torch.equal(weight, before)


# --- clipping ------------------------------------------------------------------------------------


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def updated(device, limit, *, by_torch):
    """The gradient norm, and the weights after one step."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (3,), (4, 9))]
    parameters = [nn.Parameter(p.detach().to(device)) for p in parameters]
    [optimizer] = make_optimizers(nn.ParameterList(parameters), lr=0.1, eps=1e-3, weight_decay=0.1)
    for p in parameters[:2]:  # the last one has no gradient
        p.grad = 3 * torch.randn(p.shape).to(device)
    if by_torch:
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
    else:
        norm = clip_gradients([optimizer], parameters, limit)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    return [norm, *(p.detach() for p in parameters)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_the_update_matches_that_of_gradients_clipped_by_torch(device, limit):
    pairs = zip(
        updated(device, limit, by_torch=False), updated(device, limit, by_torch=True), strict=True
    )
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=0 if device == "cpu" else 1e-6, atol=0)
