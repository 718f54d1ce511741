"""Workers on a cluster are the target in this process: the contract, and what cannot work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")
import ray

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.target.ray.connection import Connection
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
    with cluster(2, 2) as started, Connection(started.address):
        yield started


def test_contract(nodes, model, monkeypatch):
    """One start of the workers for each encoding: a backend finds them by name."""
    reference = tiny_model("llama")
    for supervision, workers in {"hidden": 2, "probs": 1, "logits": 1}.items():
        described = section(nodes, model, supervision=supervision, workers=workers)
        with (
            RAY.placed(described, aux_layers=3, name="shared") as variables,
            monkeypatch.context() as patch,
        ):
            patch.setenv(FLEET_VARIABLE, variables[FLEET_VARIABLE])
            case = Case("ray", reference, lambda _, d=described: opened(d), supervision)
            for check in CHECKS:
                check(case)
    until(everything_is_free)


def test_rows_of_several_ranks_are_captured_once(nodes, model, monkeypatch):
    described = section(nodes, model, workers=2)
    with RAY.placed(described, aux_layers=3, name="shared") as variables:
        monkeypatch.setenv(FLEET_VARIABLE, variables[FLEET_VARIABLE])
        with opened(described) as one, opened(described) as other:
            until(lambda: all(state.up for t in (one, other) for state in t._fleet._states))
            one.askers = other.askers = 2
            for rows in batches(12):
                ours, theirs = one.answer_async(rows), other.answer_async(rows)
                pairs = zip(ours.result().tensors(), theirs.result().tensors(), strict=True)
                assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
            workers = [state.actor for state in one._fleet._states]
            figures = ray.get([worker.figures.remote() for worker in workers])
    assert [(f["asked"], f["captured"]) for f in figures] == [(12, 6), (12, 6)]


def test_a_slow_trainer_fills_nothing(nodes, model):
    """However much is asked for, only `prefetch` questions leave this process at a time."""
    with opened(section(nodes, model, workers=1, prefetch=2)) as target:
        seen, ask = [], target._fleet.ask

        def counted(use, **more):
            seen.append(sum(state.in_flight for state in target._fleet._states) + 1)
            return ask(use, **more)

        target._fleet.ask = counted
        futures = [target.answer_async(rows) for rows in batches(30)]
        assert len([future.result() for future in futures]) == 30
    assert max(seen) <= 2


def test_what_cannot_work_is_one_line(nodes, model, tmp_path):
    with pytest.raises(BadInput, match="nowhere"):
        opened(section(nodes, tmp_path / "nowhere"))
    with pytest.raises(TargetUnreachable, match="no room for 9 target workers of 1 CPU each"):
        opened(section(nodes, model, workers=9, wait_s=1.0))
    until(everything_is_free)


def _asked(worker):
    try:
        return ray.get(worker.figures.remote())
    except ray.exceptions.RayError as error:
        return error


def test_without_a_worker_the_run_stops_resumable(nodes, model):
    with opened(section(nodes, model, workers=1)) as target:
        target._fleet._wait_s = 2.0
        worker = target._fleet._states[0].actor
        ray.kill(worker)  # for good
        until(lambda: isinstance(_asked(worker), ray.exceptions.RayActorError))
        with pytest.raises(TargetUnreachable, match="no target worker answered for 2 s"):
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


def test_a_trainer_that_is_killed_leaves_nothing(nodes, model):
    command = [sys.executable, "-c", _DRIVER, nodes.address, str(model)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        assert not everything_is_free()
        process.kill()
    until(everything_is_free)
