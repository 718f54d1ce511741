"""The simulated cluster: every batch is taken once, nothing beats its lower bound, and simple cases
match figures computed by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.train.planning.simulation import Pipeline

seconds = st.floats(0.01, 2.0)
several = st.lists(seconds, min_size=1, max_size=7).map(tuple)
STEPS = 240  # a multiple of every number of workers below, so that whole rounds are averaged


@st.composite
def pipelines(draw, times=several):
    return Pipeline(
        target_s=draw(times), step_s=draw(times), carry_s=draw(st.floats(0.0, 0.5)),
        workers=draw(st.integers(1, 6)), ranks=draw(st.integers(1, 5)),
        prefetch=draw(st.integers(1, 3)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(1, 60))
def test_every_batch_is_taken_once_in_order(pipeline, steps):
    run = pipeline.run(steps)
    assert run.taken == (tuple(range(steps)),) * pipeline.ranks
    assert sum(run.answered) == steps * pipeline.ranks
    times = [t for pair in zip(run.ready_s, run.end_s, strict=True) for t in pair]
    assert times == sorted(times)
    assert 0.0 < run.waiting_share() < 1.0
    assert run == pipeline.run(steps)  # deterministic


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(0, 60))
def test_nothing_is_faster_than_its_slowest_part(pipeline, more):
    """Workers, trainers, links and questions in flight bound every run from its start; the run
    covers whole cycles of the times that it cycles through."""
    cycle = len(pipeline.target_s) * len(pipeline.step_s)
    steps = cycle * (1 + more // cycle)
    run = pipeline.run(steps)
    assert run.end_s[-1] >= steps * pipeline.bound_s * (1 - 1e-9)
    assert run.busy_share() <= 1 + 1e-9
    trained = sum(pipeline.step_s) / len(pipeline.step_s)
    assert run.step_s() * (1 - run.waiting_share()) == pytest.approx(trained)


@settings(max_examples=60, deadline=None)
@given(seconds, seconds, st.floats(0.0, 0.5), st.integers(1, 6), st.integers(1, 3))
def test_constant_times_match_the_period_computed_by_hand(target, step, carry, workers, prefetch):
    """One rank: the period is the largest of a batch's cost to workers, link and trainer, and its
    round trip divided by the number of questions in flight."""
    pipeline = Pipeline(target, step, carry, workers, prefetch=prefetch)
    by_hand = max(target / workers, step, carry, (target + carry) / (prefetch * workers))
    assert pipeline.bound_s == pytest.approx(by_hand)
    run = pipeline.run(2 * STEPS)
    assert run.step_s(STEPS) == pytest.approx(by_hand, rel=0.02)
    assert run.waiting_share(STEPS) == pytest.approx(1 - step / by_hand, abs=0.02)
    assert run.busy_share(STEPS) == pytest.approx(target / workers / by_hand, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(seconds, seconds, st.floats(0.0, 0.5), st.integers(1, 3))
def test_more_workers_are_never_slower(target, step, carry, prefetch):
    runs = [Pipeline(target, step, carry, n, prefetch=prefetch).run(STEPS) for n in range(1, 7)]
    ends = [run.end_s[-1] for run in runs]
    assert all(later <= before + 1e-9 for before, later in pairwise(ends))
    shares = [run.waiting_share() for run in runs]
    assert all(later <= before + 1e-9 for before, later in pairwise(shares))


def test_a_run_computed_by_hand():
    """Two workers that take 4 s, transfers and steps of 1 s; two questions in flight, one link."""
    run = Pipeline(4.0, 1.0, 1.0, workers=2, prefetch=1).run(4)
    # the answers of second 4 reach the rank at 5 and 6, when each worker is asked again
    assert run.ready_s == (5.0, 6.0, 10.0, 11.0)
    assert run.end_s == (6.0, 7.0, 11.0, 12.0)
    assert run.answered == (2, 2)
    assert run.waiting_share() == pytest.approx(8 / 12)
