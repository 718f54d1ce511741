"""Training on ranks that share their rows: the same weights, the same figures, less memory."""

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.methods.eagle3 import Eagle3
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.train.evaluate import evaluate
from fledge.train.fit import fit
from fledge.train.setup import _parts, make_objective, set_up
from fledge.train.step import Models, Sums, train_step
from ranks import run_ranks
from train.tiny import Notes

STEPS = 10
PEAGLE = ("objective.kind=peagle", "objective.num_depths=4", "draft.layers=2")
MICRO = "training.micro_batch=2"


def in_float64(training):
    """The same run in float64: what is left of a difference is the order of sums."""
    opened, recipe = training.parts, training.recipe
    module = opened.target.info().module.double()
    target = HFEagle3TargetModel(module, opened.target.aux_layer_ids, supervision="hidden")
    draft, vocabulary = training.draft.double(), training.vocabulary
    target.set_vocab_mapping(
        torch.from_numpy(vocabulary.selected_token_ids), torch.from_numpy(vocabulary.t2d)
    )
    objective = make_objective(recipe, draft, vocabulary, target, opened.device, opened.world)
    return _parts(recipe, Models(target, objective, opened.device, opened.world))


def ten_steps(recipe):
    """(weights, sums, evaluation) of a rank after ten steps."""
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
def test_ten_steps_are_those_of_one_rank(recipe, kind, size, context):
    steps = (f"training.steps={STEPS}", *kind)
    weights, sums, evaluation = ten_steps(recipe(*steps, MICRO))
    packs = 2 // (size // context)  # of a step, by rank
    cut = (f"training.context={context}", f"training.micro_batch={packs}")
    for got, summed, evaluated in run_ranks(size, ten_steps, recipe(*steps, *cut)):
        for name, tensor in weights.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9)
        for name, total in sums.items():
            torch.testing.assert_close(summed[name], total, rtol=1e-9, atol=1e-9)
        assert_figures(evaluated, evaluation, rel=1e-9)


def assert_figures(found, wanted, *, rel):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=rel), name


def trained(recipe):
    training, notes = set_up(recipe), Notes()
    fit(training, notes)
    return notes.lines, notes.evaluations


@pytest.mark.ranks
def test_a_whole_run_on_shared_rows(recipe):
    """With evaluations, logs and checkpoints; two micro-batches a step."""
    options = ("training.steps=6", "training.accumulate=2", "training.micro_batch=1")
    lines, evaluations = trained(recipe(*options, run="one"))
    (shared, found), _ = run_ranks(2, trained, recipe(*options, "training.context=2", run="two"))
    for ours, theirs in zip(lines, shared, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["supervised"] == ours["supervised"]
    for ours, theirs in zip(evaluations, found, strict=True):
        assert_figures(theirs["evaluation"], ours["evaluation"], rel=1e-4)


def test_a_method_that_needs_whole_rows_says_so(recipe, monkeypatch):
    monkeypatch.setattr(Eagle3, "splits_rows", False)
    with pytest.raises(BadInput, match=r"context=2.*must be 1: EAGLE-3 needs each row on one rank"):
        recipe("training.context=2")
    assert recipe().training.context == 1
