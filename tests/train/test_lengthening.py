"""A finished run says so, and is lengthened only on purpose: bit for bit, whenever it is killed."""

import json
import re

import pytest

from fledge.cli.train import check_existing, run_recipe
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe
from fledge.train import setup as building
from fledge.train.checkpoint import newest_checkpoint
from fledge.train.optimizer import learning_rate
from train.test_fit import comparable, differing, final_weights, layout, stop_after, train
from train.tiny import Notes

pytestmark = pytest.mark.slow

FEW, MORE = ("training.steps=5",), ("training.steps=12", "training.extend=true")


def test_a_finished_run_says_so_without_its_target(recipe, monkeypatch, capsys, tmp_path):
    assert run_recipe(recipe(*FEW)) == 0
    capsys.readouterr()

    def set_up(*_, **__):
        raise AssertionError("a finished run was set up again")

    monkeypatch.setattr(building, "set_up", set_up)
    before = layout(tmp_path / "run"), comparable(tmp_path / "run")
    assert run_recipe(recipe(*FEW)) == 0
    assert "already finished at step 5" in capsys.readouterr().out
    assert run_recipe(recipe(*FEW), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["finished"], found["already_finished"]) == (5, True, True)
    assert found["after"]["step"] == 5
    assert (layout(tmp_path / "run"), comparable(tmp_path / "run")) == before


def test_a_finished_run_from_before_says_so_too(recipe, capsys, tmp_path):
    """Its checkpoints do not say how long it was to be: it is set up, and then nothing happens."""
    train(recipe(*FEW))
    forget_length(tmp_path / "run")
    assert run_recipe(recipe(*FEW)) == 0
    assert "already finished at step 5" in capsys.readouterr().out


def forget_length(run):
    newest, _ = newest_checkpoint(run)
    state = newest.path / "state.json"
    held = json.loads(state.read_text())
    assert held.pop("steps") == held["step"]
    held.pop("schedule_from")
    state.write_text(json.dumps(held))


def test_more_steps_are_refused_unless_they_are_meant(recipe, tmp_path):
    train(recipe(*FEW))
    both = re.compile(
        r"finished at step 5 .*steps: 5 -> 12.*training.extend=true.*draft.init_from="
    )
    with pytest.raises(BadInput, match=both):
        check_existing(recipe("training.steps=12"))
    with pytest.raises(BadInput, match="finished at step 5, the recipe asks for 12"):
        train(recipe("training.steps=12"))  # from Python, too
    with pytest.raises(BadInput, match="finished at step 5, the recipe asks for 3"):
        train(recipe("training.steps=3", "training.extend=true"))
    with pytest.raises(BadInput, match=r"training\.lr"):
        check_existing(recipe(*MORE, "training.lr=0.5"))
    check_existing(recipe(*MORE))
    check_existing(recipe(*FEW, "training.extend=true"))


def test_an_unfinished_run_is_not_lengthened(recipe, monkeypatch):
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
    wanted = [learning_rate(step, 5, **shape) for step in range(5)]
    wanted += [learning_rate(step, 7, **shape) for step in range(7)]
    lines = [line for line in comparable(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["lr"] for line in lines] == pytest.approx(wanted)
    assert load_recipe(tmp_path / "run" / "recipe.yaml").training.steps == 12
    check_existing(recipe("training.steps=12", *options))  # that is its recipe now


@pytest.mark.parametrize(("taken", "old"), [(0, True), (1, False), (3, True), (6, False)], ids=str)
def test_a_kill_in_the_added_steps_changes_nothing(recipe, monkeypatch, tmp_path, taken, old):
    """Killed without a word after so many added steps: before, at and behind a checkpoint (6, 9).
    Windows of metrics do not end where the first part did."""
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
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")
    assert layout(tmp_path / "whole") == layout(tmp_path / "cut")
    assert run_recipe(recipe(*MORE, *options, run="cut")) == 0  # finished: nothing more is added
    assert newest_checkpoint(tmp_path / "cut")[0].step == 12


def die_after(monkeypatch, steps):
    """A process that is gone, as far as the run's files are concerned."""
    from fledge.train import fit as fit_module

    real, taken = fit_module.train_step, []

    def stepping(parts, batch, **more):
        taken.append(batch.step)
        if len(taken) > steps:
            raise KeyboardInterrupt
        return real(parts, batch, **more)

    monkeypatch.setattr(fit_module, "train_step", stepping)


def test_damaged_added_steps_are_added_again(recipe, monkeypatch, tmp_path):
    """Back to the checkpoint that ended the run, though its recipe says its new length by now."""
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
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


def test_epochs_lengthen_too_and_a_run_twice(recipe, tmp_path):
    first = train(recipe("training.epochs=1")).state.step
    second = train(recipe("training.epochs=2", "training.extend=true")).state
    assert second.step > first
    assert second.schedule_from == first
    third = train(recipe("training.epochs=3", "training.extend=true")).state
    assert third.schedule_from == second.step
    assert third.first == second.first  # before any training
