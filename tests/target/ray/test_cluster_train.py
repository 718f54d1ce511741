"""`fledge cluster train`: two ranks and two targets, and a machine that vanishes in the middle."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")

from fledge.target.ray.connection import Connection
from fledge.train.fit import fit
from fledge.train.setup import set_up
from ranks import run_ranks
from target.ray.clusters import cluster, everything_is_free, until
from train.test_fit import comparable, differing, final_weights
from train.tiny import Notes

pytestmark = pytest.mark.cluster

STEPS = 400
LONG = (f"training.steps={STEPS}", "training.epochs=1", "training.micro_batch=1",
        "checkpoint.every_steps=10", "evaluation.every_steps=200")  # fmt: skip


def train(recipe):
    assert fit(set_up(recipe), Notes()).finished


def fledge(*words):
    return [sys.executable, "-m", "fledge", *map(str, words)]


def shown(nodes, *options):
    command = fledge("cluster", "status", "--address", nodes.address, *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(nodes):
    return json.loads(shown(nodes, "--json"))


def steps(run):
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return int(max(names, default="step-0").removeprefix("step-"))


@contextmanager
def training(nodes, path, *options):
    command = fledge("cluster", "train", path, "--ranks", 2, "--address", nodes.address, *options)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def comes_to(step, run, process):
    until(lambda: steps(run) >= step or process.poll() is not None, timeout_s=120)
    assert process.poll() is None, process.communicate()


def started_again(nodes, process):
    """What status says when both ranks are there for the second time."""
    for _ in range(40):
        assert process.poll() is None, process.communicate()
        [told] = status(nodes)
        if told["run"]["run"]["restarts"] and len(told["ranks"]) == 2:
            return told
    raise AssertionError("the ranks did not come back")


def test_a_machine_lost_in_the_middle_changes_nothing(recipe, tmp_path):
    run_ranks(2, train, recipe(*LONG, run="whole"))
    there = ("target.backend=ray", "target.workers=2", "target.placement=spread")
    path, run = tmp_path / "recipe.yaml", tmp_path / "cut"
    path.write_text(recipe(*LONG, *there, run="cut").to_yaml())
    with cluster(4, 4) as nodes:
        with training(nodes, path, "--json") as process:
            comes_to(20, run, process)
            [before] = status(nodes)
            nodes.remove(nodes.node_of(before["ranks"]["rank-0"]["node_id"]))
            after = started_again(nodes, process)
            table = shown(nodes)
            written, said = process.communicate(timeout=120)
        with Connection(nodes.address):
            until(everything_is_free)
    assert process.returncode == 0, said
    assert "start again from step" in said
    outcome = json.loads(written)
    assert (outcome["finished"], outcome["step"]) == (True, STEPS)
    assert set(before["ranks"]) == set(after["ranks"]) == {"rank-0", "rank-1"}
    assert set(before["targets"]) == {"target-0", "target-1"}
    assert before["run"]["run"]["restarts"] == 0
    assert after["run"]["run"]["restarts"] == 1
    assert after["ranks"]["rank-0"]["restarts"] == 1
    assert after["run"]["run"]["tokens_per_s"] > 0
    said_of = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert "waiting for the target" in table
    assert {"rank-0", "rank-1", "target-0", "target-1"} <= said_of.keys()
    assert str(after["ranks"]["rank-1"]["pid"]) in said_of["rank-1"]
    assert {facts["node_id"] for facts in after["ranks"].values()} == {nodes.nodes[0].node_id}
    assert differing(final_weights(tmp_path / "whole"), final_weights(run)) == []
    assert comparable(tmp_path / "whole") == comparable(run)


def test_a_run_is_stopped_continued_and_goes_on_with_fewer_ranks(recipe, tmp_path):
    """Ranks with a target each: what is placed is up to the recipe."""
    run_ranks(2, train, recipe(*LONG, run="whole"))
    path, run = tmp_path / "recipe.yaml", tmp_path / "cut"
    path.write_text(recipe(*LONG, run="cut").to_yaml())
    with cluster(1, 1) as nodes:
        with training(nodes, path) as process:
            comes_to(20, run, process)
            process.send_signal(signal.SIGTERM)
            written, said = process.communicate(timeout=60)
        assert process.returncode == 143, said
        assert "the same command continues the run" in written
        with training(nodes, path, "--wait-s", 5) as process:
            comes_to(steps(run) + 20, run, process)
            [before] = status(nodes)
            nodes.remove(nodes.node_of(before["ranks"]["rank-0"]["node_id"]))
            written, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert "room for 1 of 2 ranks" in said
    assert differing(final_weights(tmp_path / "whole"), final_weights(run)) == []
