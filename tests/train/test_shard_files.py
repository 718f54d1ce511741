"""Checkpoints of sharded runs are readable by any number of ranks."""

import shutil

import pytest

from fledge.core.errors import BadInput
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.training import setup as building
from fledge.training.checkpoint import newest_checkpoint
from fledge.training.fit import fit
from fledge.training.setup import set_up
from ranks import run_ranks
from train.test_sharding import doubled
from train.tiny import Notes

pytestmark = pytest.mark.ranks

SAVED_AT = 3


def run(recipe):
    building.make_draft = doubled
    assert fit(set_up(recipe), Notes()).finished


def cut(recipe, name, *, ranks, shard):
    """Six steps of the same four packs on this many ranks, with a checkpoint in the middle."""
    step = f"training.micro_batch=1 training.accumulate={4 // ranks} training.shard={shard}"
    often = f"checkpoint.every_steps={SAVED_AT} checkpoint.keep=9 evaluation.every_steps=9"
    return recipe("training.steps=6", "data.valid_rows=2", *step.split(), *often.split(), run=name)


def cut_off(run, copy):
    """Copy a run as it was at its first checkpoint."""
    shutil.copytree(run, copy, symlinks=True)
    for path in (copy / "checkpoints").iterdir():
        if path.name != f"step-{SAVED_AT:08d}":
            shutil.rmtree(path)
    return copy


def everything(run):
    """The whole weights and moments of a run's newest checkpoint."""
    newest, _ = newest_checkpoint(run)
    assert newest.step == 6
    moments = {name: t for name, t in newest.tensors().items() if name.startswith("optimizer.")}
    return newest.draft_tensors() | moments


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.fixture(scope="module")
def saved_on_four(tiny_target, tiny_chats, tmp_path_factory):
    from train.tiny import recipe_for

    root = tmp_path_factory.mktemp("runs")

    def make(*overrides, run):
        return recipe_for(tiny_target, tiny_chats, root / run, *overrides)

    run_ranks(4, run, cut(make, "four", ranks=4, shard=4))
    return make, root / "four"


@pytest.mark.parametrize(("ranks", "shard"), [(4, 4), (4, 2), (2, 2), (1, 1)])
def test_a_run_saved_on_four_ranks_resumes_on_other_layouts(saved_on_four, ranks, shard):
    make, four = saved_on_four
    name = f"resumed-{ranks}-{shard}"
    copy = cut_off(four, four.parent / name)
    run_ranks(ranks, run, cut(make, name, ranks=ranks, shard=shard))
    difference = largest_difference(everything(four), everything(copy))
    assert difference == 0.0 if (ranks, shard) == (4, 4) else difference < 1e-9


def test_a_run_saved_by_one_rank_resumes_on_two(saved_on_four):
    make, four = saved_on_four
    run_ranks(1, run, cut(make, "one", ranks=1, shard=1))
    one = four.parent / "one"
    assert largest_difference(everything(four), everything(one)) < 1e-9
    copy = cut_off(one, four.parent / "from-one")
    run_ranks(2, run, cut(make, "from-one", ranks=2, shard=2))
    assert largest_difference(everything(one), everything(copy)) < 1e-9


def test_a_different_number_of_packs_per_step_is_refused(saved_on_four):
    make, four = saved_on_four
    cut_off(four, four.parent / "fewer")
    fewer = cut(make, "fewer", ranks=4, shard=1)  # cut for four ranks, run on one
    with pytest.raises(BadInput, match="takes 4 packs a step, not 1"):
        run_ranks(1, run, fewer)


def test_a_sharded_run_leaves_a_loadable_draft(saved_on_four):
    _, four = saved_on_four
    assert LlamaEagle3DraftModel.from_pretrained(four / "best").config.draft_vocab_size == 128
