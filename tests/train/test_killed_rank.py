"""kill -9 of one rank at any moment: the others end, no saved step is lost, and the final weights
are the same."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from fledge.training.checkpoint import newest_checkpoint
from fledge.training.fit import fit
from fledge.training.setup import set_up
from ranks import _free_port, run_ranks
from train.test_fit import differing
from train.tiny import Notes

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # every kill starts two ranks again


def tensors(run):
    checkpoint, complaints = newest_checkpoint(run)
    assert complaints == []
    files = {}
    for path in sorted(checkpoint.path.glob("*.safetensors")):
        files |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return {n: t for n, t in files.items() if "window" not in n}


def train(recipe):
    assert fit(set_up(recipe), Notes()).finished


def _one_rank(rank, port, recipe):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # silence gloo's messages about dead peers
    train(recipe)


def test_kill_nine_of_one_rank_at_ten_random_moments(recipe, tmp_path):
    """Two ranks share the draft; a checkpoint at every step, so that some kills hit a save."""
    often = ("checkpoint.every_steps=1", "training.steps=60", "evaluation.every_steps=100")
    options = (*often, "data.valid_rows=2", "training.micro_batch=1", "training.shard=2")
    run_ranks(2, train, recipe(*options, run="whole"))
    context, rng = multiprocessing.get_context("fork"), random.Random(7)
    kills = steps = 0
    for _ in range(60):
        port = _free_port()
        ranks = [
            context.Process(target=_one_rank, args=(r, port, recipe(*options, run="cut")))
            for r in range(2)
        ]
        for process in ranks:
            process.start()
        if kills < 10:
            _wait_for_a_step(tmp_path / "cut", beyond=steps, ranks=ranks)
            time.sleep(rng.uniform(0.0, 0.4))
            victim = rng.choice(ranks)
            os.kill(victim.pid, signal.SIGKILL)
            kills += 1
        for process in ranks:
            process.join(timeout=60)
            assert not process.is_alive()
        newest, complaints = newest_checkpoint(tmp_path / "cut")
        assert complaints == []
        assert newest.step >= steps  # no saved step is lost
        steps = newest.step
        if all(process.exitcode == 0 for process in ranks):
            break
    assert kills == 10
    assert steps == 60
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "cut")) == []
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*"))


def test_the_death_of_a_rank_is_one_line_on_the_others(recipe, tmp_path):
    """Of rank 0, which holds the store; torchrun, which ends the others, is not there."""
    path = recipe("training.steps=5000", "training.micro_batch=1").write_resolved(tmp_path / "r")
    port, ranks, errors = _free_port(), [], []
    for rank in range(3):
        environment = {
            "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-m", "fledge", "train", str(path)]
        errors.append(tmp_path / f"{rank}.err")
        with errors[-1].open("w") as error:
            environment = os.environ | environment
            ranks.append(subprocess.Popen(command, env=environment, stdout=error, stderr=error))
    _wait_for_checkpoint(tmp_path / "run", beyond=0, running=lambda: ranks[0].poll() is None)
    ranks[0].kill()
    assert [process.wait(timeout=60) for process in ranks] == [-signal.SIGKILL, 2, 2]
    for error in errors[1:]:
        *before, last = error.read_text().splitlines()
        assert all("prepares this data" in line for line in before)
        assert re.match(r"fledge: another rank is gone \(.*\); the same command continues", last)


def _wait_for_a_step(run, *, beyond, ranks):
    _wait_for_checkpoint(
        run, beyond=beyond, running=lambda: all(process.is_alive() for process in ranks)
    )


def _wait_for_checkpoint(run, *, beyond, running):
    """Wait for one more checkpoint, so that the ranks are in the middle of their work."""
    end = time.monotonic() + 60
    while time.monotonic() < end and running():
        names = [path.name for path in (run / "checkpoints").glob("step-*")]
        if int(max(names, default="step-0").removeprefix("step-")) > beyond:
            return
        time.sleep(0.01)
