"""Training with targets on a cluster equals training with a local target, bit for bit."""

import subprocess
import sys

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")

from fledge.target.ray.connection import connected
from ranks import _free_port
from target.ray.clusters import cluster, everything_is_free, until
from train.test_fit import comparable, differing, final_weights

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes():
    with cluster(1, 1) as started:
        yield started


def on_cluster(recipe, nodes, *overrides):
    """The same run with its target in two workers: only the kind of target changes."""
    ray_target = ["target.backend=ray", f"target.address={nodes.address}", "target.workers=2"]
    return recipe(*overrides, *ray_target, run="ray")


def train(recipe, path):
    """Two ranks in processes of their own: this one has Ray's threads, which a fork would break."""
    path.write_text(recipe.to_yaml())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [*torchrun, f"--master-port={_free_port()}", "-m", "fledge", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [(), ("training.context=2",)], ids=["own rows", "shared rows"])
def test_two_ranks_share_the_workers(recipe, nodes, tmp_path, more):
    train(recipe(*more, run="here"), tmp_path / "here.yaml")
    train(on_cluster(recipe, nodes, *more), tmp_path / "there.yaml")
    assert differing(final_weights(tmp_path / "here"), final_weights(tmp_path / "ray")) == []
    assert comparable(tmp_path / "here") == comparable(tmp_path / "ray")
    with connected(nodes.address):
        until(everything_is_free)
