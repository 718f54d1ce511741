"""`run_ranks`: results by rank, the first error, no process left behind."""

import os
import signal
import time

import pytest
import torch

from fledge.core.distributed import join_world, leave_world
from ranks import run_ranks

pytestmark = pytest.mark.ranks


def _sum(factor):
    world = join_world(torch.device("cpu"), context=2)
    total = int(world.sum_(torch.tensor(world.rank)))
    return factor * world.rank, total, world.data_rank, world.context_rank


def test_results_come_back_by_rank():
    assert run_ranks(4, _sum, 10) == [(0, 6, 0, 0), (10, 6, 0, 1), (20, 6, 1, 0), (30, 6, 1, 1)]


def _fail_on_one():
    world = join_world(torch.device("cpu"))
    if world.rank == 1:
        raise KeyError("broken here")
    world.barrier()  # waits for a rank that never arrives


def test_the_first_error_ends_every_rank():
    begin = time.monotonic()
    with pytest.raises(KeyError, match="broken here") as caught:
        run_ranks(2, _fail_on_one)
    assert "on rank 1 of 2" in caught.value.__notes__[0]
    assert time.monotonic() - begin < 60


def _leave_after_a_death(path):
    world = join_world(torch.device("cpu"))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # all work is done, and another command ends it
    leave_world(world)
    path.write_text("left")


def test_a_rank_that_dies_once_all_work_is_done_fails_nobody(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 died without a word"):
        run_ranks(2, _leave_after_a_death, tmp_path / "rank 0")
    assert (tmp_path / "rank 0").read_text() == "left"


def test_a_rank_that_dies_is_named():
    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(2, os._exit, 3)
