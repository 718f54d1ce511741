"""Training on ranks that split their rows: the same weights and figures as on one rank."""

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.methods.eagle3.method import Eagle3
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.fit import evaluate, fit
from fledge.training.setup import _parts, make_objective, set_up
from fledge.training.step import Models, Sums, train_step
from ranks import run_ranks
from train.test_fit import PEAGLE
from train.tiny import Notes

STEPS = 10
MICRO = "training.micro_batch=2"


def in_float64(training):
    """The same run in float64, so that only the order of sums can make a difference."""
    parts, recipe = training.parts, training.recipe
    module = parts.target.info().module.double()
    target = HFEagle3TargetModel(module, parts.target.aux_layer_ids, supervision="hidden")
    draft, vocabulary = training.draft.double(), training.vocabulary
    target.set_vocab_mapping(
        torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
    )
    objective = make_objective(recipe, draft, vocabulary, target, parts.device, parts.world)
    return _parts(recipe, Models(target, objective, parts.device, parts.world, parts.clock))


def ten_steps(recipe):
    """Returns (weights, sums, evaluation) of a rank after ten steps."""
    training = set_up(recipe)
    parts, stream = in_float64(training), training.stream
    parts.objective.draft_model.train()
    sums = Sums.zeros(parts.objective.depths, parts.device)
    for step in range(STEPS):
        sums += train_step(parts, stream.batch(step), lr=3e-3).sums
    evaluation = evaluate(parts, training.held_out)
    return training.draft.state_dict(), vars(sums.over(parts.world)), evaluation


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [(), PEAGLE], ids=["eagle3", "peagle"])
@pytest.mark.parametrize(("size", "context"), [(2, 2), (4, 4), (4, 2)])
def test_ten_steps_match_those_of_one_rank(recipe, kind, size, context):
    steps = (f"training.steps={STEPS}", *kind)
    weights, sums, evaluation = ten_steps(recipe(*steps, MICRO))
    packs = 2 // (size // context)  # per step and rank
    cut = (f"training.context={context}", f"training.micro_batch={packs}")
    for got, summed, evaluated in run_ranks(size, ten_steps, recipe(*steps, *cut)):
        for name, tensor in weights.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9)
        for name, total in sums.items():
            torch.testing.assert_close(summed[name], total, rtol=1e-9, atol=1e-9)
        assert_figures(evaluated, evaluation, rel=1e-9)


def assert_figures(actual, expected, *, rel):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=rel), name


def trained(recipe):
    training, notes = set_up(recipe), Notes()
    fit(training, notes)
    return notes.lines, notes.evaluations


@pytest.mark.ranks
def test_a_whole_run_on_split_rows(recipe):
    """With evaluations, logs and checkpoints; two micro-batches per step."""
    options = ("training.steps=6", "training.accumulate=2", "training.micro_batch=1")
    lines, evaluations = trained(recipe(*options, run="one"))
    (shared, evaluated), _ = run_ranks(
        2, trained, recipe(*options, "training.context=2", run="two")
    )
    for expected, actual in zip(lines, shared, strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["supervised"] == expected["supervised"]
    for expected, actual in zip(evaluations, evaluated, strict=True):
        assert_figures(actual["evaluation"], expected["evaluation"], rel=1e-4)


def test_a_method_that_needs_whole_rows_refuses_to_split_them(recipe, monkeypatch):
    monkeypatch.setattr(Eagle3, "splits_rows", False)
    with pytest.raises(BadInput, match=r"context=2.*must be 1: EAGLE-3 needs each row on one rank"):
        recipe("training.context=2")
    assert recipe().training.context == 1
