"""Runs whose ranks share one target train and write the same as a single process."""

import pytest

from fledge.cli.train import run_recipe
from fledge.core.errors import BadInput
from fledge.target.cache.job import CacheOptions
from fledge.training.fit import fit
from fledge.training.precompute import recipe_job
from fledge.training.setup import set_up
from ranks import run_ranks
from train.test_fit import assert_close_drafts
from train.tiny import Notes

pytestmark = pytest.mark.ranks

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


def test_a_shared_target_is_not_precomputed(recipe, tmp_path):
    with pytest.raises(BadInput, match=r"target\.parallel: a target that ranks share"):
        recipe_job(recipe("target.parallel.fsdp=2"), tmp_path / "cache", CacheOptions())
