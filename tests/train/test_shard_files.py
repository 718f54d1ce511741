"""Checkpoints of sharded runs: complete or absent, and readable by any number of ranks."""

import contextlib
import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystem

from fledge.core.errors import BadInput, explain
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.training import setup as building
from fledge.training.checkpoint import newest_checkpoint, read_checkpoint
from fledge.training.fit import fit
from fledge.training.saving import held_names, read_shares
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
    weights = newest.draft_tensors()
    trained = {n: w for n, w in weights.items() if w.is_floating_point() and "embed" not in n}
    moments = {
        f"optimizer.{name}.{key}": torch.zeros_like(weight)
        for name, weight in trained.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    read_shares(newest.path, moments)
    return weights | moments


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
    assert not read_checkpoint(next((one / "checkpoints").iterdir())).is_sharded
    assert largest_difference(everything(four), everything(one)) < 1e-9
    copy = cut_off(one, four.parent / "from-one")
    run_ranks(2, run, cut(make, "from-one", ranks=2, shard=2))
    assert newest_checkpoint(copy)[0].is_sharded
    assert largest_difference(everything(one), everything(copy)) < 1e-9


def save_on_a_full_disk(recipe, full):
    """The line and exit code that each rank ends with when the disk of rank `full` fills up."""
    real, rank = FileSystem.create_stream, int(os.environ["RANK"])

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with real(self, path, mode) as stream:
            if rank == full:
                stream.write(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            yield stream

    FileSystem.create_stream = create_stream
    try:
        run(recipe)
    except OSError as error:
        return explain(error)


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_is_one_line_on_all_ranks_and_leaves_nothing(saved_on_four, full):
    make, four = saved_on_four
    name = f"full-{full}"
    ended = run_ranks(2, save_on_a_full_disk, cut(make, name, ranks=2, shard=2), full)
    checkpoints = four.parent / name / "checkpoints"
    place = checkpoints / f"step-{SAVED_AT:08d}"
    line = f"the disk is full ({place}); make room and run the same command again"
    assert ended == [(line, 3)] * 2
    assert not checkpoints.exists()
    run_ranks(2, run, cut(make, name, ranks=2, shard=2))
    assert largest_difference(everything(four), everything(four.parent / name)) < 1e-9


def test_a_different_number_of_packs_per_step_is_refused(saved_on_four):
    make, four = saved_on_four
    cut_off(four, four.parent / "fewer")
    fewer = cut(make, "fewer", ranks=4, shard=1)  # cut for four ranks, run on one
    with pytest.raises(BadInput, match="takes 4 packs a step, not 1"):
        run_ranks(1, run, fewer)


def test_a_sharded_run_leaves_a_loadable_draft_and_one_share_per_rank(saved_on_four):
    """Each rank's file holds only its share of the moments, and all shares add up to the whole."""
    _, four = saved_on_four
    checkpoint, _ = newest_checkpoint(four)
    assert LlamaEagle3DraftModel.from_pretrained(four / "best").config.draft_vocab_size == 128
    files = sorted(checkpoint.path.glob("shard-*.safetensors"))
    sizes = [sum(t.numel() for t in load_file(file).values()) for file in files]
    trained = sum(
        w.numel()
        for n, w in checkpoint.draft_tensors().items()
        if f"optimizer.{n}.exp_avg" in held_names(checkpoint.path)
    )
    assert sum(sizes) == 2 * trained
    assert max(sizes) < 1.05 * min(sizes)
    assert not any("exp_avg" in name for name in checkpoint.tensors())
