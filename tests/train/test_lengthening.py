"""A finished run is reported as such, and is extended only on request: bit for bit, no matter when
it is killed."""

import json
import re

import pytest

from fledge.cli.train import check_existing, run_recipe
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe
from fledge.training import setup as building
from fledge.training.checkpoint import newest_checkpoint
from fledge.training.optimizer import learning_rate
from train.test_fit import assert_same_runs, comparable, layout, stop_after, train
from train.tiny import Notes

pytestmark = pytest.mark.slow

FEW, MORE = ("training.steps=5",), ("training.steps=12", "training.extend=true")


def test_a_finished_run_is_reported_without_loading_its_target(
    recipe, monkeypatch, capsys, tmp_path
):
    assert run_recipe(recipe(*FEW)) == 0
    capsys.readouterr()

    def set_up(*_, **__):
        raise AssertionError("a finished run was set up again")

    monkeypatch.setattr(building, "set_up", set_up)
    before = layout(tmp_path / "run"), comparable(tmp_path / "run")
    assert run_recipe(recipe(*FEW)) == 0
    assert "already finished at step 5" in capsys.readouterr().out
    assert run_recipe(recipe(*FEW), as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["finished"], result["already_finished"]) == (5, True, True)
    assert result["after"]["step"] == 5
    assert (layout(tmp_path / "run"), comparable(tmp_path / "run")) == before


def test_a_finished_run_of_an_earlier_version_is_reported_too(recipe, capsys, tmp_path):
    """Its checkpoints do not record the run's length: it is set up, and then nothing is done."""
    train(recipe(*FEW))
    forget_length(tmp_path / "run")
    assert run_recipe(recipe(*FEW)) == 0
    assert "already finished at step 5" in capsys.readouterr().out


def forget_length(run):
    newest, _ = newest_checkpoint(run)
    state = newest.path / "state.json"
    fields = json.loads(state.read_text())
    assert fields.pop("steps") == fields["step"]
    fields.pop("schedule_from")
    state.write_text(json.dumps(fields))


def test_more_steps_are_refused_without_extend(recipe, tmp_path):
    train(recipe(*FEW))
    message = re.compile(
        r"finished at step 5 .*steps: 5 -> 12.*training.extend=true.*draft.init_from="
    )
    with pytest.raises(BadInput, match=message):
        check_existing(recipe("training.steps=12"))
    with pytest.raises(BadInput, match="finished at step 5, the recipe asks for 12"):
        train(recipe("training.steps=12"))  # from Python, too
    with pytest.raises(BadInput, match="finished at step 5, the recipe asks for 3"):
        train(recipe("training.steps=3", "training.extend=true"))
    with pytest.raises(BadInput, match=r"training\.lr"):
        check_existing(recipe(*MORE, "training.lr=0.5"))
    check_existing(recipe(*MORE))
    check_existing(recipe(*FEW, "training.extend=true"))


def test_an_unfinished_run_cannot_be_extended(recipe, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        train(recipe(*FEW))
    with pytest.raises(BadInput, match=r"another recipe: training\.steps: 5 -> 12"):
        check_existing(recipe("training.steps=12"))
    with pytest.raises(BadInput, match=r"stands at step [1-4] of 5: only a finished one"):
        train(recipe(*MORE))


def test_the_added_steps_have_a_schedule_of_their_own(recipe, tmp_path):
    options = ("training.warmup_steps=2", "tracking.every_steps=1")
    train(recipe(*FEW, *options))
    notes = Notes()
    assert train(recipe(*MORE, *options), notes).finished
    shape = {"peak": 3e-3, "warmup": 2, "schedule": "cosine", "final_share": 0.0}
    expected = [learning_rate(step, 5, **shape) for step in range(5)]
    expected += [learning_rate(step, 7, **shape) for step in range(7)]
    lines = [line for line in comparable(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    assert load_recipe(tmp_path / "run" / "recipe.yaml").training.steps == 12
    check_existing(recipe("training.steps=12", *options))  # the run's own recipe by now


@pytest.mark.parametrize(("taken", "old"), [(0, True), (1, False), (3, True), (6, False)], ids=str)
def test_a_kill_during_the_added_steps_changes_nothing(recipe, monkeypatch, tmp_path, taken, old):
    """Killed without warning after `taken` added steps: before, at and after a checkpoint (6, 9).
    The first part does not end at the end of a metrics window."""
    options = ("tracking.every_steps=4", "training.prefetch=0")
    for run in ("whole", "cut"):
        train(recipe(*FEW, *options, run=run))
        if old:
            forget_length(tmp_path / run)
    assert train(recipe(*MORE, *options, run="whole")).finished
    with monkeypatch.context() as patch:
        die_after(patch, taken)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(*MORE, *options, run="cut"))
    assert train(recipe(*MORE, *options, run="cut")).finished
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")
    assert layout(tmp_path / "whole") == layout(tmp_path / "cut")
    assert run_recipe(recipe(*MORE, *options, run="cut")) == 0  # finished: nothing more is added
    assert newest_checkpoint(tmp_path / "cut")[0].step == 12


def die_after(monkeypatch, steps):
    """Interrupt the run after this many steps; to its files that looks like a killed process."""

    def interrupt():
        raise KeyboardInterrupt

    stop_after(monkeypatch, steps + 1, interrupt)


def test_damaged_added_steps_are_repeated(recipe, monkeypatch, tmp_path):
    """From the checkpoint that ended the first part, although the recipe has the new length."""
    for run in ("whole", "cut"):
        train(recipe(*FEW, run=run))
    train(recipe(*MORE, run="whole"))
    with monkeypatch.context() as patch:
        die_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(*MORE, run="cut"))
    newest, _ = newest_checkpoint(tmp_path / "cut")
    assert newest.step == 6
    (newest.path / "model.safetensors").write_bytes(b"")
    assert train(recipe("training.steps=12", run="cut")).finished
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_epochs_can_be_extended_and_more_than_once(recipe, tmp_path):
    first = train(recipe("training.epochs=1")).state.step
    second = train(recipe("training.epochs=2", "training.extend=true")).state
    assert second.step > first
    assert second.schedule_from == first
    third = train(recipe("training.epochs=3", "training.extend=true")).state
    assert third.schedule_from == second.step
    assert third.first == second.first  # before any training
