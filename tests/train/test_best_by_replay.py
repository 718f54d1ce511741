"""The best checkpoint is the one that a replay of the held-out rows likes best."""

import json

import pytest

from fledge.draft.eagle3 import LlamaEagle3DraftModel
from fledge.train import fit as fit_module
from fledge.train.checkpoint import best_step
from fledge.train.evaluate import evaluate
from fledge.train.fit import fit
from fledge.train.setup import set_up
from train.tiny import Notes


def test_replayed_acceptance_chooses_not_the_teacher_forced_estimate(recipe, tmp_path, monkeypatch):
    def measured(parts, batches, *more):
        found = evaluate(parts, batches, *more)
        evaluations.append(found)
        length = {2: 9.0}.get(len(evaluations), found["acceptance_length"])
        return {**found, "tau": 100.0 + len(evaluations), "acceptance_length": length}

    evaluations = []
    monkeypatch.setattr(fit_module, "evaluate", measured)
    notes = Notes()
    outcome = fit(set_up(recipe("training.epochs=3")), notes)
    assert len(evaluations) > 3
    assert outcome.state.best_length == 9.0
    assert best_step(tmp_path / "run") == notes.evaluations[1]["step"]


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_figures_are_those_of_the_files_and_are_logged(recipe, tmp_path, kind):
    """What was measured on the run's last step is what its checkpoint's files give, reloaded."""
    more = ["objective.num_depths=3"] if kind == "peagle" else []
    training = set_up(recipe(f"objective.kind={kind}", *more))
    notes = Notes()
    fit(training, notes)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    kept = [line["evaluation"] for line in logged if "evaluation" in line]
    assert kept == [values["evaluation"] for values in notes.evaluations]
    last = notes.evaluations[-1]
    assert 1.0 <= last["evaluation"]["acceptance_length"] <= 4.0
    assert len(last["evaluation"]["joint"]) == 3
    path = tmp_path / "run" / "checkpoints" / f"step-{last['step']:08d}"
    reloaded = LlamaEagle3DraftModel.from_pretrained(path).state_dict()
    for weight in training.draft.parameters():
        weight.data.zero_()
    training.draft.load_state_dict(reloaded)
    again = evaluate(training.parts, training.held_out)
    assert again["acceptance_length"] == last["evaluation"]["acceptance_length"]
    assert again["rounds"] == last["evaluation"]["rounds"] > 8
