"""Workers and machines die, and no batch is lost: each arrives once, in order, unchanged."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ray.cluster_utils", reason="needs the cluster extra")
import ray

from fledge.core.distributed import World
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.ray.connection import connected
from fledge.training.batches import StepBatch, ask_ahead
from fledge.training.step import Clock
from target.ray.clusters import (
    batches,
    cluster,
    everything_is_free,
    opened,
    section,
    until,
)

pytestmark = pytest.mark.cluster


def test_two_hundred_batches_while_workers_and_machines_die(model, caplog):
    """Every batch arrives once, in order, unchanged; and the cluster leaves nothing behind."""
    questions = list(batches(200))
    with HFEagle3TargetModel.from_pretrained(
        str(model), supervision="hidden", dtype="float32", device="cpu"
    ) as local:
        expected = [local.answer(rows) for rows in questions]
    with cluster(1, 1) as nodes, connected(nodes.address):
        with opened(section(nodes, model, workers=2)) as target, caplog.at_level("WARNING"):
            until(lambda: all(state.up for state in target._fleet._states))

            def place(index):
                return ray.get(target._fleet._states[index].server.actor.place.remote())

            def disturb(number):
                if number == 50:
                    os.kill(place(0)[1], signal.SIGKILL)
                elif number == 100:
                    nodes.remove(nodes.node_of(place(1)[0]))
                elif number == 120:
                    nodes.nodes.append(nodes.add(1))

            cpu, answers = torch.device("cpu"), []
            asking = SimpleNamespace(target=target, world=World(), device=cpu, clock=Clock(cpu))
            steps = (StepBatch(number, 0, (rows,)) for number, rows in enumerate(questions))
            for step in ask_ahead(asking, steps):
                disturb(step.step)
                answers.append(step.answers[0].result())
            until(lambda: all(state.up for state in target._fleet._states))
        until(everything_is_free)
    assert caplog.text.count("is set aside") >= 2  # the kill and the lost machine
    assert len(answers) == 200
    for batch, reference in zip(answers, expected, strict=True):
        tensors, expected_tensors = dict(batch.tensors()), dict(reference.tensors())
        assert tensors.keys() == expected_tensors.keys()
        assert all(torch.equal(tensors[name], expected_tensors[name]) for name in expected_tensors)
