"""When a run on a cluster restarts and when it gives up, tested without a cluster."""

import pytest

from fledge.core.errors import BadInput
from fledge.core.progress import Progress
from fledge.training.cluster import Layout, _Run
from fledge.training.signals import StopSignal


class Said(Progress):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def run_of(recipe, monkeypatch, steps, ranks=1):
    """A run that loses a rank at each of these steps and then finishes."""
    run = _Run(recipe, print, Layout(ranks=ranks), Said(), {})
    lost = iter(steps)
    at = [0]

    def attempt(_, stop):
        at[0] = next(lost, None)
        return (0, "done") if at[0] is None else "rank 0 is lost"

    monkeypatch.setattr(_Run, "_attempt", attempt)
    monkeypatch.setattr(_Run, "_step", lambda _: at[0])
    return run


def test_losses_end_a_run_only_when_it_makes_no_progress(recipe, monkeypatch):
    run = run_of(recipe(), monkeypatch, [0, 0, 10, 10, 20, 30])
    assert run.to_the_end(StopSignal()) == (0, "done")
    assert run.restarts == 6
    assert run.progress.lines[-1] == "rank 0 is lost; all ranks start again from step 30"
    run = run_of(recipe(), monkeypatch, [10, 20, 20, 20])
    with pytest.raises(BadInput, match="3 starts in a row were lost at step 20"):
        run.to_the_end(StopSignal())


def test_a_stop_is_not_a_loss(recipe, monkeypatch):
    stop = StopSignal()
    stop.received = 15
    assert run_of(recipe(), monkeypatch, [0]).to_the_end(stop) == (143, "")


def test_fewer_ranks_take_the_same_steps(recipe, monkeypatch):
    run = run_of(recipe("training.shard=2", "training.accumulate=3"), monkeypatch, [], ranks=12)
    sizes = list(run._sizes())
    assert sizes == [12, 6, 4, 2]  # whole copies of a draft that is sharded over two ranks
    assert [n * run._cut_for(n).training.accumulate for n in sizes] == [36] * 4
