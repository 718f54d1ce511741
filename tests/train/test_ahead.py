"""Asking the target ahead: batch order, prefetch depth, agreement of all ranks, and stopping
while an answer is pending."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from fledge.core.distributed import World
from fledge.core.errors import TargetUnreachable
from fledge.train.ahead import answers_ahead, ask_ahead, together
from fledge.train.batches import StepBatch
from fledge.train.clock import Clock

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
    answers = [(batch, answer) for batch, answer in answers_ahead(target, list(range(7)))]
    assert [answer for _, answer in answers] == list(range(7))


def test_a_target_in_this_process_is_not_asked_ahead():
    target = SimpleNamespace(supports_async=False)
    assert [b.answers for b in ask_ahead(parts(target), steps(3, 1))] == [None] * 3


def test_a_stop_ends_the_wait_and_cancels_pending_questions():
    target = Distant(2, at_once=False)
    with pytest.raises(TargetUnreachable, match="stopped while"):
        next(ask_ahead(parts(target), steps(9, 1), stopping=lambda: True))
    assert [future.cancelled() for future in target.futures[1:]] == [True, True]


class Peer(World):
    """One of two ranks; the other one has lost its servers."""

    def sum_(self, tensor):
        return tensor + 1


def test_all_ranks_stop_when_one_loses_its_target():
    world = Peer(rank=0, size=2)
    with pytest.raises(TargetUnreachable, match="of another rank"):
        together(parts(Distant(1), world), lambda: None)
    with pytest.raises(TargetUnreachable, match="of another rank"):
        next(ask_ahead(parts(Distant(1), world), steps(3, 1)))
    together(parts(SimpleNamespace(supports_async=False), world), lambda: None)  # nothing to lose
