"""Asking the target ahead: batch order, prefetch depth, agreement of all ranks, and stopping
while an answer is pending."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from fledge.core.distributed import World
from fledge.core.errors import TargetUnreachable
from fledge.training.batches import (
    StepBatch,
    StopRequested,
    ask_ahead,
    wait_together,
)
from fledge.training.step import Clock

CPU = torch.device("cpu")


class Distant:
    """Answers each row with its own number: at once, or never."""

    supports_async = True

    def __init__(self, prefetch, at_once=True):
        self.prefetch, self.at_once, self.futures = prefetch, at_once, []

    def answer_async(self, number):
        future = Future()
        if self.at_once:
            future.set_result(number)
        self.futures.append(future)
        return future


def parts(target, world=None):
    return SimpleNamespace(target=target, world=world or World(), device=CPU, clock=Clock(CPU))


def steps(count, micro):
    for step in range(count):
        numbers = [step * micro + index for index in range(micro)]
        yield StepBatch(step, 0, (*numbers, None))


@pytest.mark.parametrize(("micro", "prefetch"), [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2)])
def test_batches_stay_in_order_and_are_prefetched_as_configured(micro, prefetch):
    target = Distant(prefetch)
    for number, batch in enumerate(ask_ahead(parts(target), steps(10, micro))):
        assert batch.step == number
        assert [f.result() for f in batch.answers] == [number * micro + i for i in range(micro)]
        pending = len(target.futures) - (number + 1) * micro
        assert min(prefetch, (9 - number) * micro) <= pending <= prefetch + micro - 1
    assert len(target.futures) == 10 * micro  # each micro-batch is asked once


def test_a_target_in_this_process_is_not_asked_ahead():
    target = SimpleNamespace(supports_async=False)
    assert [b.answers for b in ask_ahead(parts(target), steps(3, 1))] == [None] * 3


def test_a_stop_ends_the_wait_and_cancels_pending_questions():
    target = Distant(2, at_once=False)
    with pytest.raises(StopRequested):
        next(ask_ahead(parts(target), steps(9, 1), stopping=lambda: True))
    assert [future.cancelled() for future in target.futures] == [True] * 3


def test_a_stop_does_not_discard_an_answer_that_has_arrived():
    target = Distant(2)
    assert next(ask_ahead(parts(target), steps(9, 1), stopping=lambda: True)).step == 0


class Peer(World):
    """One of two ranks; the other one reports these counts."""

    def sum_(self, tensor):
        return tensor + torch.tensor(self.counts)


def peer(**counts):
    world = Peer(rank=0, size=2)
    names = ("unfinished", "failed", "stops")
    object.__setattr__(world, "counts", [counts.get(name, 0) for name in names])
    return world


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        ({"failed": 1}, TargetUnreachable),
        ({"unfinished": 1, "failed": 1}, TargetUnreachable),
        ({"unfinished": 1, "stops": 1}, StopRequested),
        ({"failed": 1, "stops": 1}, StopRequested),
    ],
    ids=str,
)
def test_what_happens_to_one_rank_while_it_waits_happens_to_all(counts, error):
    here = parts(Distant(1), peer(**counts))
    for asking in (
        lambda: wait_together(here, [], lambda: False),
        lambda: next(ask_ahead(here, steps(3, 1))),
    ):
        with pytest.raises(TargetUnreachable) as caught:
            asking()
        assert type(caught.value) is error
    local = parts(SimpleNamespace(supports_async=False), here.world)
    wait_together(local, [], lambda: False)  # nothing to wait for


def test_a_rank_without_a_failure_says_whose_it_is():
    with pytest.raises(TargetUnreachable, match="of another rank"):
        wait_together(parts(Distant(1), peer(failed=1)), [], lambda: False)
    future = Future()
    future.set_exception(TargetUnreachable("no server here"))
    with pytest.raises(TargetUnreachable, match="no server here"):
        wait_together(parts(Distant(1), peer(failed=1)), [future], lambda: False)
    broken = Future()
    broken.set_exception(KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        wait_together(parts(Distant(1)), [broken], lambda: False)
