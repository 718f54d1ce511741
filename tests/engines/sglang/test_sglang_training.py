"""A short training run through SGLang has the same loss curve as one through transformers."""

import dataclasses

import pytest
import torch

import fledge
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes


def losses(recipe, target=None):
    training = set_up(recipe)
    if target is not None:
        training.parts = dataclasses.replace(training.parts, target=target)
    notes = Notes()
    assert fit(training, notes).finished
    return [line["loss"] for line in notes.lines]


@pytest.mark.parametrize("padded", ["true", "false"])
def test_the_loss_curve_equals_that_of_transformers(recipe, tiny_target, padded):
    shared = ("training.steps=12", "tracking.every_steps=1", f"packing.padded={padded}")
    expected = losses(recipe(*shared, run="hf"))
    with fledge.SGLangEagle3TargetModel.from_pretrained(
        tiny_target,
        aux_layer_ids=[0, 1, 2],
        supervision="hidden",
        dtype=torch.float32,
        device="cpu",
    ) as target:
        sglang_losses = losses(recipe(*shared, run="sglang"), target)
    assert len(expected) == 12
    assert expected[-1] < 0.95 * expected[0]
    assert sglang_losses == pytest.approx(expected, abs=1e-3)
    with fledge.SGLangEagle3TargetModel.from_pretrained(  # negative control: other layers
        tiny_target,
        aux_layer_ids=[1, 0, 2],
        supervision="hidden",
        dtype=torch.float32,
        device="cpu",
    ) as target:
        other_losses = losses(recipe(*shared, run="other"), target)
    assert other_losses != pytest.approx(expected, abs=1e-3)
