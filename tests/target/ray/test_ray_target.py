"""Workers on a cluster equal a target in this process: the contract, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")
import ray

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.target.ray.connection import connected
from fledge.target.ray.kind import RAY
from fledge.target.ray.placing import FLEET_VARIABLE
from target.contract import CHECKS, Case
from target.ray.clusters import batches, cluster, everything_is_free, opened, section, until
from target.tiny_models import tiny_model

TESTS = Path(__file__).parents[2]
pytestmark = pytest.mark.cluster
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def nodes():
    with cluster(2, 2) as started, connected(started.address):
        yield started


def test_contract(nodes, model, monkeypatch):
    """Workers start once; the backends find them by name."""
    described = section(nodes, model, workers=2)
    with RAY.placed(described, aux_layers=3, name="shared") as variables:
        monkeypatch.setenv(FLEET_VARIABLE, variables[FLEET_VARIABLE])
        case = Case("ray", tiny_model("llama"), lambda _: opened(described), "hidden")
        for check in CHECKS:
            check(case)
    until(everything_is_free)


def test_rows_shared_by_several_ranks_are_captured_once(nodes, model, monkeypatch):
    described = section(nodes, model, workers=2)
    with RAY.placed(described, aux_layers=3, name="shared") as variables:
        monkeypatch.setenv(FLEET_VARIABLE, variables[FLEET_VARIABLE])
        with opened(described) as first, opened(described) as second:
            until(lambda: all(state.up for t in (first, second) for state in t._fleet._states))
            first.askers = second.askers = 2
            for rows in batches(12):
                answer, other_answer = first.answer_async(rows), second.answer_async(rows)
                pairs = zip(answer.result().tensors(), other_answer.result().tensors(), strict=True)
                assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
            servers = [state.server for state in first._fleet._states]
            counts = [server.get_json("/health", timeout_s=10)["questions"] for server in servers]
    assert counts == [6, 6]


def test_impossible_settings_are_refused_in_one_line(nodes, model, tmp_path):
    with pytest.raises(BadInput, match="nowhere"):
        opened(section(nodes, tmp_path / "nowhere"))
    with pytest.raises(TargetUnreachable, match="no room for 9 target workers of 1 CPU each"):
        opened(section(nodes, model, workers=9, wait_s=1.0))
    until(everything_is_free)


def _place_or_error(worker):
    try:
        return ray.get(worker.place.remote())
    except ray.exceptions.RayError as error:
        return error


def test_losing_the_only_worker_raises_target_unreachable(nodes, model):
    with opened(section(nodes, model, workers=1)) as target:
        target._fleet._wait_s = 2.0
        worker = target._fleet._states[0].server.actor
        ray.kill(worker)  # for good
        until(lambda: isinstance(_place_or_error(worker), ray.exceptions.RayActorError))
        with pytest.raises(TargetUnreachable, match="no target server answered for 2 s"):
            target.answer(next(batches(1)))


_DRIVER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from target.ray.clusters import opened, section
with opened(section(SimpleNamespace(address=sys.argv[1]), sys.argv[2], workers=2)) as target:
    target.info()
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_killed_trainer_leaves_nothing_behind(nodes, model):
    command = [sys.executable, "-c", _DRIVER, nodes.address, str(model)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        assert not everything_is_free()
        process.kill()
    until(everything_is_free)
