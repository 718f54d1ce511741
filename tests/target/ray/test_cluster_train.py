"""`fledge cluster train`: two ranks and two targets, and a machine that vanishes in the middle."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")

from fledge.target.ray.connection import connected
from fledge.training.fit import fit
from fledge.training.setup import set_up
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


def fledge(*arguments):
    return [sys.executable, "-m", "fledge", *map(str, arguments)]


def status_output(nodes, *options):
    command = fledge("cluster", "status", "--address", nodes.address, *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(nodes):
    return json.loads(status_output(nodes, "--json"))


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


def wait_for_step(step, run, process):
    until(lambda: steps(run) >= step or process.poll() is not None, timeout_s=120)
    assert process.poll() is None, process.communicate()


def status_after_restart(nodes, process):
    """The status once both ranks are up again."""
    for _ in range(40):
        assert process.poll() is None, process.communicate()
        [run_status] = status(nodes)
        if run_status["run"]["run"]["restarts"] and len(run_status["ranks"]) == 2:
            return run_status
    raise AssertionError("the ranks did not come back")


def test_losing_a_machine_mid_run_changes_nothing(recipe, tmp_path):
    run_ranks(2, train, recipe(*LONG, run="whole"))
    ray_target = ("target.backend=ray", "target.workers=2", "target.placement=spread")
    path, run = tmp_path / "recipe.yaml", tmp_path / "cut"
    path.write_text(recipe(*LONG, *ray_target, run="cut").to_yaml())
    with cluster(4, 4) as nodes:
        with training(nodes, path, "--json") as process:
            wait_for_step(20, run, process)
            [before] = status(nodes)
            nodes.remove(nodes.node_of(before["ranks"]["rank-0"]["node_id"]))
            after = status_after_restart(nodes, process)
            table = status_output(nodes)
            stdout, stderr = process.communicate(timeout=120)
        with connected(nodes.address):
            until(everything_is_free)
    assert process.returncode == 0, stderr
    assert "start again from step" in stderr
    outcome = json.loads(stdout)
    assert (outcome["finished"], outcome["step"]) == (True, STEPS)
    assert set(before["ranks"]) == set(after["ranks"]) == {"rank-0", "rank-1"}
    assert set(before["targets"]) == {"target-0", "target-1"}
    assert before["run"]["run"]["restarts"] == 0
    assert after["run"]["run"]["restarts"] == 1
    assert after["ranks"]["rank-0"]["restarts"] == 1
    assert after["run"]["run"]["tokens_per_s"] > 0
    lines = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert "waiting for the target" in table
    assert {"rank-0", "rank-1", "target-0", "target-1"} <= lines.keys()
    assert str(after["ranks"]["rank-1"]["pid"]) in lines["rank-1"]
    assert {facts["node_id"] for facts in after["ranks"].values()} == {nodes.nodes[0].node_id}
    assert differing(final_weights(tmp_path / "whole"), final_weights(run)) == []
    assert comparable(tmp_path / "whole") == comparable(run)


def test_a_run_can_be_stopped_resumed_and_continued_with_fewer_ranks(recipe, tmp_path):
    """Each rank has its own target: the recipe decides what is placed on the cluster."""
    run_ranks(2, train, recipe(*LONG, run="whole"))
    path, run = tmp_path / "recipe.yaml", tmp_path / "cut"
    path.write_text(recipe(*LONG, run="cut").to_yaml())
    with cluster(1, 1) as nodes:
        with training(nodes, path) as process:
            wait_for_step(20, run, process)
            process.send_signal(signal.SIGTERM)
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 143, stderr
        assert "the same command continues the run" in stdout
        with training(nodes, path, "--wait-s", 5) as process:
            wait_for_step(steps(run) + 20, run, process)
            [before] = status(nodes)
            nodes.remove(nodes.node_of(before["ranks"]["rank-0"]["node_id"]))
            stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert "room for 1 of 2 ranks" in stderr
    assert differing(final_weights(tmp_path / "whole"), final_weights(run)) == []
