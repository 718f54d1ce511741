"""Runs whose ranks share one target train and write the same as a single process."""

from functools import partial
from pathlib import Path

import pytest
import torch

from fledge.cli.train import run_recipe
from fledge.target.cache.job import CacheOptions
from fledge.target.cache.precompute import execute
from fledge.training.fit import fit
from fledge.training.precompute import recipe_job, recipe_target
from fledge.training.setup import set_up
from ranks import run_ranks
from train.test_fit import assert_close_drafts
from train.tiny import Notes

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
# three micro-batches per step on two ranks: at the end of the data some rank has none
UNEVEN = ("training.accumulate=3", "training.epochs=2")


@pytest.mark.parametrize(
    "layout", [("fsdp", 2), ("tp", 2), ("cp", 2)], ids=lambda layout: "".join(map(str, layout))
)
def test_two_ranks_that_share_the_target_match_one(recipe, tmp_path, layout):
    fit(set_up(recipe(*UNEVEN, "training.micro_batch=2", run="one")), Notes())
    kind, size = layout
    cut = f"target.parallel.{kind}={size}"
    shared = recipe(*UNEVEN, "training.micro_batch=1", cut, run="two")
    assert run_ranks(2, run_recipe, shared) == [0, 0]
    assert_close_drafts(tmp_path / "one", tmp_path / "two")


def _precompute(recipe, directory):
    options = CacheOptions(shard_size=7, batch_size=2)
    job = recipe_job(recipe, directory, options)
    load = partial(recipe_target, recipe, CPU)
    done = execute(job, load, device=CPU)
    return done.complete


def _payload(directory: Path) -> dict[str, bytes]:
    """The bytes of every shard and of the other safetensors files beside them."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix == ".safetensors" and path.is_file()
    }


def test_a_shared_target_writes_the_same_cache(recipe, tmp_path):
    """FSDP2 runs whole layers, so even the bytes are those of one process."""
    assert _precompute(recipe(), tmp_path / "alone")
    shared = recipe("target.parallel.fsdp=2")
    assert run_ranks(2, _precompute, shared, tmp_path / "shared") == [True, True]
    alone, together = _payload(tmp_path / "alone"), _payload(tmp_path / "shared")
    assert len(alone) > 3
    assert alone == together
