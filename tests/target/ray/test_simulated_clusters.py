"""Clusters that ran, against the same clusters simulated: tokens/s, and waiting for the target.

On a machine of two cores three workers that compute would be in each other's way. So workers and
trainer take a known time on top of a tiny model, asleep; everything else is the real thing: Ray,
its object store, the fleet, the threads that ask ahead, the training loop and its clock. Rates
come from the run over one worker, and foretell those over two and three.
"""

import statistics
import time

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")

from fledge.target.ray import placing
from fledge.target.ray.worker import TargetWorker
from fledge.train import fit as loop
from fledge.train.setup import set_up
from fledge.train.simulation import Pipeline
from target.ray.clusters import cluster, section
from train.tiny import Notes

pytestmark = pytest.mark.cluster

TARGET_S, STEP_S = 0.28, 0.02
STEPS, WINDOW = 24, 6  # windows of whole turns of 1, 2 and 3 workers
WORKERS = (1, 2, 3)
LONG = (
    f"training.steps={STEPS}", "training.micro_batch=1", f"tracking.every_steps={WINDOW}",
    "checkpoint.every_steps=1000", "evaluation.every_steps=1000", "data.valid_rows=2",
)  # fmt: skip


def slow_worker():
    class SlowWorker(TargetWorker):  # made here, so that Ray carries its code along
        def _open(self):
            fresh, target = self._target is None, super()._open()
            if fresh:
                answer = target.answer

                def slowly(rows):
                    time.sleep(TARGET_S)
                    return answer(rows)

                target.answer = slowly
            return target

    return SlowWorker


@pytest.fixture
def slow_steps(monkeypatch):
    step = loop.train_step

    def slowly(*given, **named):
        time.sleep(STEP_S)
        return step(*given, **named)

    monkeypatch.setattr(loop, "train_step", slowly)


@pytest.fixture
def nodes(recipe, monkeypatch):
    """Three workers that are there before any run: each run finds the first of them by name."""
    monkeypatch.setattr(placing, "TargetWorker", slow_worker())
    target = recipe().target
    with cluster(max(WORKERS)) as nodes:
        there = section(
            nodes, target.model, workers=max(WORKERS), aux_layer_ids=target.aux_layer_ids
        )
        with placing.start_fleet(there, aux_layers=3) as started:
            monkeypatch.setenv(placing.FLEET_VARIABLE, started.name)
            yield nodes


def trained(recipe, nodes, workers, tokens_s, shares, measure=None):
    """Train over so many workers; medians over windows, without the first, in which queues fill."""
    there = ("target.backend=ray", f"target.address={nodes.address}", f"target.workers={workers}")
    training = set_up(recipe(*LONG, *there, run=f"on-{workers}"))
    with training.parts.target as target:
        _all_up(target, workers)
        measured = measure(training) if measure else None
        notes = Notes()
        assert loop.fit(training, notes).finished
    lines = notes.lines[1:]
    assert len(lines) == STEPS // WINDOW - 1
    tokens_s[workers] = statistics.median(line["tokens_per_s"] for line in lines)
    shares[workers] = statistics.median(line["target_share"] for line in lines)
    return training.stream.packs_per_step * training.stream.tokens, measured


def _all_up(target, workers):
    deadline = time.monotonic() + 60
    while sum(state.up for state in target._fleet._states) < workers:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def carried(training):
    """Seconds that an answer takes beyond its computation, and those of the computation."""
    target, batch = training.parts.target, training.held_out[0]
    ways, computed = [], []
    for _ in range(5):
        before = _figures(target)
        begin = time.perf_counter()
        target.answer(batch)
        whole = time.perf_counter() - begin
        computed.append(_figures(target)["seconds"] - before["seconds"])
        ways.append(whole - computed[-1])
    return statistics.median(ways), statistics.median(computed)


def _figures(target):
    return target._fleet.ask(lambda worker: worker.figures.remote())


def test_the_simulation_foretells_clusters_of_one_two_and_three_workers(recipe, nodes, slow_steps):
    tokens_s, shares = {}, {}
    tokens, (carry_s, target_s) = trained(recipe, nodes, 1, tokens_s, shares, measure=carried)
    step_s = (1 - shares[1]) * tokens / tokens_s[1]  # by the trainer's own clock
    for workers in WORKERS[1:]:
        trained(recipe, nodes, workers, tokens_s, shares)
    print(f"measured: target {target_s:.3f} s, carry {carry_s:.4f} s, step {step_s:.4f} s")
    for workers in WORKERS:
        run = Pipeline(target_s, step_s, carry_s, workers).run(STEPS)
        foretold = tokens * run.batches_per_s(WINDOW), run.waiting_share(WINDOW)
        print(f"{workers}: {foretold} foretold, {tokens_s[workers], shares[workers]} happened")
        assert foretold == pytest.approx((tokens_s[workers], shares[workers]), rel=0.2)
    assert tokens_s[3] > 1.6 * tokens_s[1]  # the workers did work side by side
