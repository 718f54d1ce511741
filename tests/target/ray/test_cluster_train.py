"""`fledge cluster train`: two ranks and two targets, and a machine that vanishes in the middle."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")
import ray

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
    until(lambda: steps(run) >= step or process.poll() is not None, timeout_s=300)
    assert process.poll() is None, process.communicate()


def node_of_a_rank(nodes):
    """The machine that the first of the ranks was placed on."""
    with connected(nodes.address):
        tables = ray.util.placement_group_table().values()
        [group] = [t for t in tables if t["state"] == "CREATED" and t["strategy"] == "PACK"]
        return nodes.node_of(group["bundles_to_node_id"][0])


def test_losing_a_machine_mid_run_changes_nothing(recipe, tmp_path):
    run_ranks(2, train, recipe(*LONG, run="whole"))
    ray_target = ("target.backend=ray", "target.workers=2", "target.placement=spread")
    path, run = tmp_path / "recipe.yaml", tmp_path / "cut"
    path.write_text(recipe(*LONG, *ray_target, run="cut").to_yaml())
    with cluster(4, 4) as nodes:
        with training(nodes, path, "--json") as process:
            wait_for_step(20, run, process)
            nodes.remove(node_of_a_rank(nodes))
            stdout, stderr = process.communicate(timeout=300)
        with connected(nodes.address):
            until(everything_is_free)
    assert process.returncode == 0, stderr
    assert "start again from step" in stderr
    outcome = json.loads(stdout)
    assert (outcome["finished"], outcome["step"]) == (True, STEPS)
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
            stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 143, stderr
        assert "the same command continues the run" in stdout
        with training(nodes, path, "--wait-s", 5) as process:
            wait_for_step(steps(run) + 20, run, process)
            nodes.remove(node_of_a_rank(nodes))
            stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    assert "room for 1 of 2 ranks" in stderr
    assert differing(final_weights(tmp_path / "whole"), final_weights(run)) == []
