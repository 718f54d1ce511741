"""Training options that are off by default: schedule wsd, Muon, the average of the weights."""

import math
import shutil

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.train import setup as building
from fledge.train.average import Average
from fledge.train.checkpoint import newest_checkpoint
from fledge.train.evaluate import evaluate
from fledge.train.fit import fit
from fledge.train.muon import SkippingMuon
from fledge.train.optimizer import learning_rate, trained_by_muon
from fledge.train.planning.memory import draft_bytes, kept_bytes
from fledge.train.setup import set_up
from fledge.train.sharding import whole_tensor
from fledge.train.step import train_step
from ranks import run_ranks
from train.test_fit import comparable, differing, final_weights, stop_after
from train.test_sharding import doubled
from train.tiny import Notes

ALL = (
    "training.optimizer=muon", "training.ema=0.9", "training.schedule=wsd",
    "training.decay_share=0.5", "objective.feature_dropout=0.1",
)  # fmt: skip


# --- the schedule -------------------------------------------------------------------------------


def test_warm_up_stable_decay():
    def at(step, *, total=100, share=0.2):
        return learning_rate(
            step, total, peak=2.0, warmup=10, schedule="wsd", final_share=0.1, decay_share=share
        )

    assert [at(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert {at(step) for step in range(10, 81)} == {2.0}
    assert at(85) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # 1 - sqrt(5 / 20)
    assert at(99) == pytest.approx(2.0 * (0.1 + 0.9 * (1 - math.sqrt(19 / 20))))
    assert at(100) == pytest.approx(0.2)
    assert at(11, total=12, share=1.0) == pytest.approx(2.0 * (0.1 + 0.9 * (1 - math.sqrt(0.5))))
    assert at(10, total=12, share=1.0) == 2.0  # never before the warm-up is over


# --- Muon ---------------------------------------------------------------------------------------


SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (8, 3), (6, 4)]  # one batch of four, two of one


def test_muon_is_torchs_and_a_bad_step_leaves_everything_as_it_was(monkeypatch):
    monkeypatch.setattr("fledge.train.muon._BATCH", 3 * 24)  # of those four, three fit
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1}
    muon = SkippingMuon(ours, **options)
    plain = torch.optim.Muon(theirs, **options, adjust_lr_fn="match_rms_adamw")
    for bad in (1.0, 0.0, 1.0, 0.0, 0.0):
        before = [(p.clone(), muon.state[p].get("momentum_buffer")) for p in ours]
        before = [(p, None if buffer is None else buffer.clone()) for p, buffer in before]
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn_like(mine)
            mine.grad = torch.full_like(mine, math.nan) if bad else other.grad.clone()
        muon.found_inf = torch.tensor(bad)
        muon.step()
        if bad:
            for mine, (old, buffer) in zip(ours, before, strict=True):
                assert torch.equal(mine, old)
                now = muon.state[mine]["momentum_buffer"]
                assert torch.equal(now, torch.zeros_like(now) if buffer is None else buffer)
            continue
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            held = [o.state[p]["momentum_buffer"] for o, p in ((muon, mine), (plain, other))]
            torch.testing.assert_close(*held, rtol=1e-6, atol=1e-7)
            # steps are rounded to bfloat16, and products of another shape round otherwise
            torch.testing.assert_close(mine, other, rtol=0, atol=0.02 * 0.1)


def test_muon_takes_no_step_where_there_is_no_gradient():
    still, moved = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    moved.grad = torch.randn(4, 4)
    SkippingMuon([still, moved], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(still, torch.ones(4, 4))
    assert not torch.equal(moved, torch.ones(4, 4))


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(recipe):
    training = set_up(recipe("training.optimizer=muon", "draft.freeze_embeddings=false"))
    adamw, *muon = training.parts.optimizers
    names = {id(p): name for name, p in training.draft.named_parameters()}

    def held(optimizer):
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    matrices = [name for one in muon for name in held(one)]
    assert "fc.weight" in matrices
    assert all(name.endswith(("proj.weight", "fc.weight")) for name in matrices)
    assert {"embed_tokens.weight", "lm_head.weight", "norm.weight"} <= set(held(adamw))
    assert sorted(matrices + held(adamw)) == sorted(names.values())
    with pytest.raises(BadInput, match="muon needs whole matrices"):
        recipe("training.optimizer=muon", "training.shard=2")


def test_a_run_with_all_of_them_resumes_bit_for_bit(recipe, monkeypatch, tmp_path):
    train(recipe(*ALL, run="whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert not train(recipe(*ALL, run="cut")).finished
    assert train(recipe(*ALL, run="cut")).finished
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


def train(recipe, notes=None):
    return fit(set_up(recipe), notes or Notes())


# --- the average --------------------------------------------------------------------------------


def test_the_average_is_its_definition():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    average, mean = Average([weight], 0.75), weight.detach().clone()
    taken = 0
    for bad in (False, True, False, *[False] * 40):
        if not bad:
            with torch.no_grad():
                weight.add_(torch.randn_like(weight))
            taken += 1
            share = min(0.75, taken / (taken + 9))
            mean = share * mean + (1 - share) * weight.detach()
        average.update([weight], taken=torch.tensor(taken), bad=torch.tensor(bad))
        torch.testing.assert_close(average.aside[0], mean, rtol=1e-12, atol=1e-12)
    kept = weight.detach().clone()
    with average.swapped([weight]):
        torch.testing.assert_close(weight.detach(), mean, rtol=1e-12, atol=1e-12)
    assert torch.equal(weight, kept)


def test_an_average_that_forgets_at_once_is_no_average(recipe, tmp_path):
    train(recipe(run="plain"))
    train(recipe("training.ema=0", run="ema"))
    plain, averaged = final_weights(tmp_path / "plain"), final_weights(tmp_path / "ema")
    assert differing(plain, {name: averaged[name] for name in plain}) == []
    assert comparable(tmp_path / "plain") == comparable(tmp_path / "ema")


def test_what_is_measured_and_kept_is_the_average(recipe, tmp_path):
    asked, notes = recipe("training.ema=0.9"), Notes()
    train(asked, notes)
    checkpoint, _ = newest_checkpoint(tmp_path / "run")
    draft, beside = checkpoint.draft_tensors(), checkpoint.tensors()
    assert not torch.equal(draft["fc.weight"], beside["stepped.fc.weight"])
    other = set_up(recipe(run="other"))
    other.draft.load_state_dict(draft)
    found = evaluate(other.parts, other.held_out)
    assert found == notes.evaluations[-1]["evaluation"]


def averages_after(recipe):
    """The average and the weights after six steps, whole."""
    building.make_draft = doubled
    training = set_up(recipe)
    parts = training.parts
    for step in range(6):
        train_step(parts, training.stream.batch(step), lr=3e-3)
    return [whole_tensor(t).detach().numpy() for t in (*parts.average.aside, *parts.parameters)]


@pytest.mark.ranks
def test_the_average_on_two_ranks_is_that_on_one(recipe):
    def cut(ranks, shard):
        share = f"training.accumulate={4 // ranks}", f"training.shard={shard}"
        return recipe("training.ema=0.9", "training.micro_batch=1", "training.epochs=7", *share)

    [one] = run_ranks(1, averages_after, cut(1, 1))
    for shard in (1, 2):
        for found in run_ranks(2, averages_after, cut(2, shard)):
            assert max(abs(a - b).max() for a, b in zip(one, found, strict=True)) < 1e-9


@pytest.mark.ranks
def test_a_sharded_average_is_saved_and_read_by_one_rank(recipe, tmp_path):
    """Two ranks train; one takes the second half again, from their checkpoint."""
    cut = ("training.ema=0.9", "training.steps=6", "checkpoint.every_steps=3", "checkpoint.keep=9")
    shared = recipe(*cut, "training.micro_batch=1", "training.shard=2")
    run_ranks(2, lambda: train(shared) and None)
    at_end, _ = newest_checkpoint(tmp_path / "run")
    assert at_end.is_sharded
    draft = at_end.draft_tensors()
    shutil.rmtree(at_end.path)
    alone = set_up(recipe(*cut, "training.micro_batch=2"))
    assert fit(alone, Notes()).state.step == 6
    for name, tensor in final_weights(tmp_path / "run").items():
        if name in draft:
            torch.testing.assert_close(tensor, draft[name], rtol=1e-3, atol=2e-5)
    assert alone.draft.fc.weight.ne(draft["fc.weight"]).any()  # the weights are not their average


# --- memory -------------------------------------------------------------------------------------


def test_the_plan_counts_what_is_kept(recipe):
    training = set_up(recipe())
    draft = training.draft
    trained = sum(p.numel() for p in training.parts.parameters)
    matrices = sum(p.numel() for p in trained_by_muon(draft).values())
    for options, expected in {
        (): 8 * trained,
        ("training.ema=0.9",): 12 * trained,
        ("training.optimizer=muon",): 8 * trained - 4 * matrices,
    }.items():
        assert kept_bytes(draft, recipe(*options).training) == expected
        real = set_up(recipe(*options))
        parts = real.parts
        train_step(parts, real.stream.batch(0), lr=1e-3)
        held = [v for one in parts.optimizers for s in one.state.values() for v in s.values()]
        held += [] if parts.average is None else parts.average.aside
        assert sum(t.nbytes for t in held if t.ndim) == expected
    assert draft_bytes(1000, 10, kept=12_000) == 20_040
