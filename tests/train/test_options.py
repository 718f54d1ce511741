"""Training options that are off by default: Muon, wsd, feature dropout."""

import math

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.training.optimizer import SkippingMuon, trained_by_muon
from fledge.training.planning.step_cost import DraftMemory
from fledge.training.setup import set_up
from fledge.training.step import train_step
from train.test_fit import assert_resumes_bitwise

ALL = (
    "training.optimizer=muon", "training.schedule=wsd", "training.decay_share=0.5",
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


# --- memory -------------------------------------------------------------------------------------


def test_the_plan_counts_the_optimizer_state(recipe):
    training = set_up(recipe())
    draft = training.draft
    trained = sum(p.numel() for p in training.parts.parameters)
    matrices = sum(p.numel() for p in trained_by_muon(draft).values())
    for options, expected in {
        (): 8 * trained,
        ("training.optimizer=muon",): 8 * trained - 4 * matrices,
    }.items():
        assert DraftMemory.of(draft, recipe(*options).training).kept == expected
        real = set_up(recipe(*options))
        parts = real.parts
        train_step(parts, real.stream.batch(0), lr=1e-3)
        state = [v for opt in parts.optimizers for s in opt.state.values() for v in s.values()]
        assert sum(t.nbytes for t in state if t.ndim) == expected
    assert DraftMemory(1000, 10, 12_000).bytes() == 20_040
