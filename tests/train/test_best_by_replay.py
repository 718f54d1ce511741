"""The best checkpoint is the one with the longest acceptance in a replay of the held-out rows."""

import json

import pytest

from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.training import fit as fit_module
from fledge.training.checkpoint import best_step
from fledge.training.fit import evaluate, fit
from fledge.training.setup import set_up
from train.tiny import Notes


def test_best_is_chosen_by_replay_not_by_the_teacher_forced_estimate(recipe, tmp_path, monkeypatch):
    def measured(parts, batches, *more):
        figures = evaluate(parts, batches, *more)
        evaluations.append(figures)
        length = {2: 9.0}.get(len(evaluations), figures["acceptance_length"])
        return {**figures, "tau": 100.0 + len(evaluations), "acceptance_length": length}

    evaluations = []
    monkeypatch.setattr(fit_module, "evaluate", measured)
    notes = Notes()
    outcome = fit(set_up(recipe("training.epochs=3")), notes)
    assert len(evaluations) > 3
    assert outcome.state.best_length == 9.0
    assert best_step(tmp_path / "run") == notes.evaluations[1]["step"]


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_logged_figures_match_the_saved_checkpoint(recipe, tmp_path, kind):
    """Reloading the last checkpoint gives the figures that were measured at the run's last step."""
    more = ["objective.num_depths=3"] if kind == "peagle" else []
    training = set_up(recipe(f"objective.kind={kind}", *more))
    notes = Notes()
    fit(training, notes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    logged = [line["evaluation"] for line in lines if "evaluation" in line]
    assert logged == [values["evaluation"] for values in notes.evaluations]
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
