"""Training options that are off by default: Muon, weight averaging."""

import math
import shutil

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.training import setup as building
from fledge.training.checkpoint import newest_checkpoint
from fledge.training.fit import fit
from fledge.training.optimizer import Average, SkippingMuon, trained_by_muon
from fledge.training.planning.step_cost import DraftMemory
from fledge.training.setup import set_up
from fledge.training.sharding import whole_tensor
from fledge.training.step import train_step
from ranks import run_ranks
from train.test_fit import assert_resumes_bitwise, comparable, differing, final_weights, train
from train.test_sharding import doubled
from train.tiny import Notes

ALL = (
    "training.optimizer=muon", "training.ema=0.9", "training.schedule=wsd",
    "training.decay_share=0.5",
)  # fmt: skip


# --- Muon ---------------------------------------------------------------------------------------


# Muon batches equal shapes, transposed where needed: one batch of four, two of one
SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (8, 3), (6, 4)]


def test_muon_matches_torch_and_a_bad_step_changes_nothing(monkeypatch):
    monkeypatch.setattr(
        "fledge.training.optimizer._BATCH", 3 * 24
    )  # at most three of those four fit
    torch.manual_seed(0)
    weights, torch_weights = (
        [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2)
    )
    options = {"lr": 0.1, "weight_decay": 0.1}
    muon = SkippingMuon(weights, **options)
    plain = torch.optim.Muon(torch_weights, **options, adjust_lr_fn="match_rms_adamw")
    for bad in (1.0, 0.0, 1.0, 0.0, 0.0):
        before = [(p.clone(), muon.state[p].get("momentum_buffer")) for p in weights]
        before = [(p, None if buffer is None else buffer.clone()) for p, buffer in before]
        for weight, expected in zip(weights, torch_weights, strict=True):
            expected.grad = torch.randn_like(weight)
            weight.grad = torch.full_like(weight, math.nan) if bad else expected.grad.clone()
        muon.found_inf = torch.tensor(bad)
        muon.step()
        if bad:
            for weight, (old, buffer) in zip(weights, before, strict=True):
                assert torch.equal(weight, old)
                now = muon.state[weight]["momentum_buffer"]
                assert torch.equal(now, torch.zeros_like(now) if buffer is None else buffer)
            continue
        plain.step()
        for weight, expected in zip(weights, torch_weights, strict=True):
            momenta = [
                optimizer.state[p]["momentum_buffer"]
                for optimizer, p in ((muon, weight), (plain, expected))
            ]
            torch.testing.assert_close(*momenta, rtol=1e-6, atol=1e-7)
            # steps are rounded to bfloat16, and products of another shape round differently
            torch.testing.assert_close(weight, expected, rtol=0, atol=0.02 * 0.1)


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest(recipe):
    training = set_up(recipe("training.optimizer=muon", "draft.freeze_embeddings=false"))
    adamw, *muon = training.parts.optimizers
    names = {id(p): name for name, p in training.draft.named_parameters()}

    def trained(optimizer):
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    matrices = [name for optimizer in muon for name in trained(optimizer)]
    assert "fc.weight" in matrices
    assert all(name.endswith(("proj.weight", "fc.weight")) for name in matrices)
    assert {"embed_tokens.weight", "lm_head.weight", "norm.weight"} <= set(trained(adamw))
    assert sorted(matrices + trained(adamw)) == sorted(names.values())
    with pytest.raises(BadInput, match="muon needs whole matrices"):
        recipe("training.optimizer=muon", "training.shard=2")


def test_a_run_with_all_options_resumes_bit_for_bit(recipe, monkeypatch, tmp_path):
    assert_resumes_bitwise(recipe, monkeypatch, tmp_path, *ALL, after=5)


# --- the average --------------------------------------------------------------------------------


def test_the_average_follows_its_definition():
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


def test_an_average_with_zero_decay_is_the_last_weights(recipe, tmp_path):
    train(recipe(run="plain"))
    train(recipe("training.ema=0", run="ema"))
    plain, averaged = final_weights(tmp_path / "plain"), final_weights(tmp_path / "ema")
    assert differing(plain, {name: averaged[name] for name in plain}) == []
    assert comparable(tmp_path / "plain") == comparable(tmp_path / "ema")


def averages_after(recipe):
    """The average and the weights after six steps, gathered from all ranks."""
    building.make_draft = doubled
    training = set_up(recipe)
    parts = training.parts
    for step in range(6):
        train_step(parts, training.stream.batch(step), lr=3e-3)
    return [whole_tensor(t).detach().numpy() for t in (*parts.average.aside, *parts.parameters)]


@pytest.mark.ranks
def test_the_average_on_two_ranks_matches_one_rank(recipe):
    def cut(ranks, shard):
        share = f"training.accumulate={4 // ranks}", f"training.shard={shard}"
        return recipe("training.ema=0.9", "training.micro_batch=1", "training.epochs=7", *share)

    [expected] = run_ranks(1, averages_after, cut(1, 1))
    for shard in (1, 2):
        for actual in run_ranks(2, averages_after, cut(2, shard)):
            assert max(abs(a - b).max() for a, b in zip(expected, actual, strict=True)) < 1e-9


@pytest.mark.ranks
def test_a_sharded_average_can_be_resumed_by_one_rank(recipe, tmp_path):
    """Two ranks train; one rank repeats the second half from their checkpoint."""
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
    # the weights differ from their average
    assert alone.draft.fc.weight.ne(draft["fc.weight"]).any()


# --- memory -------------------------------------------------------------------------------------


def test_the_plan_counts_the_optimizer_state(recipe):
    training = set_up(recipe())
    draft = training.draft
    trained = sum(p.numel() for p in training.parts.parameters)
    matrices = sum(p.numel() for p in trained_by_muon(draft).values())
    for options, expected in {
        (): 8 * trained,
        ("training.ema=0.9",): 12 * trained,
        ("training.optimizer=muon",): 8 * trained - 4 * matrices,
    }.items():
        assert DraftMemory.of(draft, recipe(*options).training).kept == expected
        real = set_up(recipe(*options))
        parts = real.parts
        train_step(parts, real.stream.batch(0), lr=1e-3)
        state = [v for opt in parts.optimizers for s in opt.state.values() for v in s.values()]
        state += [] if parts.average is None else parts.average.aside
        assert sum(t.nbytes for t in state if t.ndim) == expected
    assert DraftMemory(1000, 10, 12_000).bytes() == 20_040
