"""One draft sharded over several ranks (`training.shard`): the same weights as on one rank, and
each rank holds its share."""

import pytest
import torch

from fledge.cli.train import run_recipe
from fledge.core.errors import BadInput
from fledge.target.cache.job import CacheOptions
from fledge.target.weights import whole_tensor
from fledge.training import setup as building
from fledge.training.fit import fit
from fledge.training.precompute import recipe_job
from fledge.training.setup import set_up
from fledge.training.step import train_step
from ranks import run_ranks
from train.test_fit import PEAGLE, assert_close_drafts
from train.tiny import Notes

pytestmark = pytest.mark.ranks

LAMBDA = ("objective.loss=lk_lambda", "objective.loss.scale=0.9", "draft.freeze_embeddings=true")
BLOCK = ("objective.anchors=1024", "draft.layers=2", "draft.draft_vocab_size=null")
DFLASH = ("objective.kind=dflash", "objective.listened_layers=3", "objective.block_size=5", *BLOCK)
DSPARK = (
    "objective.kind=dspark", "objective.listened_layers=3", "objective.block_size=4",
    "objective.markov_rank=8", *BLOCK,
)  # fmt: skip
DPACE = (*DFLASH, "objective.weights=dpace")
BLOCKS = {"dflash": DFLASH, "dspark": DSPARK, "dpace": DPACE}
KINDS = {"eagle3": (), "peagle": PEAGLE, "lambda": LAMBDA, **BLOCKS}

LAYOUTS = ((2, 2), (4, 4), (4, 2))  # (ranks, ranks that share one draft)


def doubled(*given):
    """A draft in float64: a difference beyond the ninth decimal place is more than rounding."""
    return building_make_draft(*given).double()


building_make_draft = building.make_draft


def weights_after_ten_steps(recipe):
    """The last ten steps of a run; the very last step has fewer micro-batches than slots."""
    building.make_draft = doubled
    training = set_up(recipe)
    stream, parts = training.stream, training.parts
    norms = []
    for step in range(stream.steps - 10, stream.steps):
        result = train_step(parts, stream.batch(step), lr=3e-3)
        norms.append(float(result.grad_norm))
    weights = {name: whole_tensor(p).detach() for name, p in training.draft.named_parameters()}
    moments = [state["exp_avg_sq"] for state in parts.optimizers[0].state.values()]
    shares = (getattr(t, "_local_tensor", t) for t in [*parts.parameters, *moments])
    elements = sum(share.numel() for share in shares)
    idle = [rows is None for rows in stream.batch(stream.steps - 1).micro]
    return {n: w.numpy() for n, w in weights.items()}, norms, elements, idle


def cut(recipe, *options, ranks, shard):
    """The same four packs per step, divided over this many ranks."""
    parts = f"training.micro_batch=1 training.accumulate={4 // ranks} training.epochs=7"
    return recipe(
        *options,
        *parts.split(),
        f"training.shard={shard}",
        "training.clip=0.5",
        "data.valid_rows=12",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_training_matches_one_rank(recipe, kind):
    options = KINDS[kind]
    [(wanted, norms, elements, last)] = run_ranks(
        1, weights_after_ten_steps, cut(recipe, *options, ranks=1, shard=1)
    )
    assert any(last)
    assert not all(last)
    for ranks, shard in ((2, 2),) if kind in BLOCKS else LAYOUTS:
        results = run_ranks(
            ranks, weights_after_ten_steps, cut(recipe, *options, ranks=ranks, shard=shard)
        )
        assert any(all(idle) for *_, idle in results)  # some rank has nothing to do
        for weights, sharded_norms, share, _ in results:
            assert sharded_norms == pytest.approx(norms, rel=1e-9)
            assert share == pytest.approx(elements / shard, rel=0.05)
            for name, weight in wanted.items():
                difference = abs(weights[name] - weight).max()
                assert difference < 1e-9, (name, ranks, shard)


def norms_in_bfloat16(recipe):
    training = set_up(recipe)
    stream, parts = training.stream, training.parts
    results = [train_step(parts, stream.batch(step), lr=1e-3) for step in range(3)]
    assert {p.dtype for p in parts.parameters} == {torch.float32}
    return [float(result.grad_norm) for result in results]


def test_sharded_bfloat16_matches_one_rank_in_bfloat16(recipe):
    """The same casts in the same places: only the order of float32 sums differs."""
    options = ("training.compute_dtype=bfloat16",)
    [wanted] = run_ranks(1, norms_in_bfloat16, cut(recipe, *options, ranks=1, shard=1))
    for norms in run_ranks(2, norms_in_bfloat16, cut(recipe, *options, ranks=2, shard=2)):
        assert norms[0] == pytest.approx(wanted[0], rel=1e-5)
        assert norms == pytest.approx(wanted, rel=2e-2)


# --- a target that ranks share -------------------------------------------------------------------


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
