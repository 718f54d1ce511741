"""The training loop: it learns, resumes bit for bit, never loses work and reports why it stops."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fledge.cli.train import check_existing, run_recipe
from fledge.core.errors import BadInput, TargetUnreachable
from fledge.core.files import alone_in
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training import fit as fit_module
from fledge.training import setup as building
from fledge.training.checkpoint import best_step, newest_checkpoint
from fledge.training.fit import evaluate, fit
from fledge.training.setup import set_up
from ranks import run_ranks
from train.tiny import Notes


def train(recipe, notes=None):
    return fit(set_up(recipe), notes or Notes())


def final_weights(directory):
    checkpoint, _ = newest_checkpoint(Path(directory))
    return checkpoint.draft_tensors() | checkpoint.tensors()


def differing(a, b):
    """Names of the tensors of two checkpoints that are not equal to the last bit."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


def comparable(directory):
    """The metrics lines without their timings."""
    timed = {"tokens_per_s", "target_share", "seconds"}
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def assert_same_runs(one, other):
    assert differing(final_weights(one), final_weights(other)) == []
    assert comparable(one) == comparable(other)


def assert_close_drafts(one, two):
    expected = load_file(one / "best" / "model.safetensors")
    actual = load_file(two / "best" / "model.safetensors")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def stop_after(monkeypatch, steps, stop=lambda: os.kill(os.getpid(), signal.SIGTERM)):
    """Do this in the `steps`-th training step; by default, a signal stops the run after it."""
    real, taken = fit_module.train_step, []

    def stepping(parts, batch, **more):
        taken.append(batch.step)
        if len(taken) == steps:
            stop()
        return real(parts, batch, **more)

    monkeypatch.setattr(fit_module, "train_step", stepping)


def assert_resumes_bitwise(recipe, monkeypatch, tmp_path, *options, after):
    """A run that a signal stopped after this many steps ends like one that nothing stopped, whose
    notes are returned."""
    whole, resumed = Notes(), Notes()
    assert train(recipe(*options, run="whole"), whole).finished
    with monkeypatch.context() as patch:
        stop_after(patch, after)
        outcome = train(recipe(*options, run="cut"))
    assert (outcome.finished, outcome.signal) == (False, signal.SIGTERM)
    assert train(recipe(*options, run="cut"), resumed).finished
    assert any("resuming at step" in note for note in resumed.notes)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")
    return whole


def test_a_run_learns_and_leaves_a_loadable_draft(recipe, tmp_path):
    notes = Notes()
    outcome = train(recipe("training.epochs=12"), notes)
    assert outcome.finished
    line = notes.lines[0]
    figures = {"step", "loss", "lr", "tau", "tokens_per_s", "padding_share", "target_share"}
    assert figures <= line.keys()
    assert len(line["prefix_acceptance"]) == len(line["accuracy"]) == 3
    losses = [line["loss"] for line in notes.lines]
    assert losses[-1] < 0.8 * losses[0]
    taus = [e["evaluation"]["tau"] for e in notes.evaluations]
    assert notes.evaluations[0]["step"] == 0
    assert max(taus) > taus[0]
    # The best checkpoint is the one with the highest measured acceptance, and loads as a draft.
    best = max(notes.evaluations[1:], key=lambda e: e["evaluation"]["acceptance_length"])
    assert best_step(tmp_path / "run") == best["step"]
    draft = LlamaEagle3DraftModel.from_pretrained(tmp_path / "run" / "best")
    assert draft.config.draft_vocab_size == 128
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(kept) <= 3  # two newest and the best
    assert not [name for name in kept if name.startswith(".")]
    resolved = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "ttt_steps: 3" in resolved


def test_a_run_reports_its_progress(recipe):
    training, events = set_up(recipe()), []
    training.watch = lambda *event: events.append(event)
    total = training.stream.steps
    fit(training, Notes())
    packs = len(training.held_out)
    assert packs > 1
    evaluated = [tuple(counts) for event, *counts in events if event == "evaluating"]
    due = {0, total, *range(4, total, 4)}
    assert evaluated == len(due) * [(i, packs) for i in range(packs)]
    assert [step for event, step, _ in events if event == "training"] == list(range(total))
    assert ("saving", total, total) in events


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_signal_stops_after_the_step_and_resuming_is_bitwise(
    recipe, monkeypatch, tmp_path, steps
):
    assert_resumes_bitwise(recipe, monkeypatch, tmp_path, after=steps)


@pytest.mark.parametrize("steps", [3, 9])  # of 7 in an epoch
def test_a_run_that_keeps_states_resumes_bitwise(recipe, monkeypatch, tmp_path, steps):
    """Kept states are lost with the process, and depend on the pack they were computed in."""
    real = HFEagle3TargetModel.answer

    def rounding(target, rows):
        batch = real(target, rows)
        factor = 1 + 1e-5 * (int(rows.input_ids.sum()) % 997)
        return replace(batch, aux_hidden_states=batch.aux_hidden_states * factor)

    monkeypatch.setattr(HFEagle3TargetModel, "answer", rounding)
    options = ("target.keep_states_gb=1", "training.epochs=3")
    assert_resumes_bitwise(recipe, monkeypatch, tmp_path, *options, after=steps)


def _train_quietly(recipe):
    torch.set_num_threads(1)
    train(recipe)


@pytest.mark.slow
def test_kill_nine_at_ten_random_moments(recipe, tmp_path):
    """SIGKILL real processes while they compute or save; the final weights are the same bits."""
    options = ("checkpoint.every_steps=1", "training.epochs=4")
    train(recipe(*options, run="whole"))
    context = multiprocessing.get_context("fork")
    rng = random.Random(11)
    kills = 0
    for attempt in range(60):
        process = context.Process(target=_train_quietly, args=(recipe(*options, run="cut"),))
        process.start()
        deadline = time.monotonic() + (rng.uniform(0.3, 1.2) if kills < 10 else 120)
        process.join(timeout=deadline - time.monotonic())
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        elif kills >= 10:
            break
        else:  # finished before it was killed often enough: start over
            assert process.exitcode == 0
            assert_same_runs(tmp_path / "whole", tmp_path / "cut")
            (tmp_path / "cut").rename(tmp_path / f"done{attempt}")
    assert kills >= 10
    assert process.exitcode == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")
    assert not [p for p in (tmp_path / "cut").rglob(".*") if p.suffix in (".tmp", ".old")]


@pytest.mark.parametrize("victim", ["model.safetensors", "training.safetensors", "state.json"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(recipe, monkeypatch, tmp_path, victim):
    train(recipe(run="whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        train(recipe(run="cut"))
    newest, _ = newest_checkpoint(tmp_path / "cut")
    path = newest.path / victim
    path.write_bytes(path.read_bytes()[:-3])
    notes = Notes()
    assert train(recipe(run="cut"), notes).finished
    assert "passing over a checkpoint" in notes.notes[0]
    assert newest.path.name in notes.notes[0]
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []


def layout(directory):
    """The names of all files of a run, and what its `best` link points to."""
    names = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    return names, os.readlink(directory / "best")


@pytest.mark.parametrize("undone", ["mark_best", "prune"])
def test_a_kill_right_after_a_checkpoint(recipe, monkeypatch, tmp_path, undone):
    """The checkpoint is complete, but `best` is not updated yet, or old ones are not removed."""
    options = ("checkpoint.keep=1", "evaluation.every_steps=2")
    real, calls = getattr(fit_module.checkpoints, undone), []
    monkeypatch.setattr(
        fit_module.checkpoints,
        undone,
        lambda *args: (calls.append(args), real(*args)),
    )
    train(recipe(*options, run="whole"))

    def dying(*args):
        calls.pop()
        if not calls:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(fit_module.checkpoints, undone, dying)  # at its last call
    with pytest.raises(KeyboardInterrupt):
        train(recipe(*options, run="cut"))
    monkeypatch.setattr(fit_module.checkpoints, undone, real)
    assert layout(tmp_path / "cut") != layout(tmp_path / "whole")
    assert train(recipe(*options, run="cut")).finished
    assert layout(tmp_path / "cut") == layout(tmp_path / "whole")
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


@pytest.mark.parametrize("better", [True, False])
def test_a_run_whose_last_evaluation_was_interrupted_is_finished_by_it(
    recipe, monkeypatch, tmp_path, better
):
    """Also if the draft of the last step turns out not to be the best."""
    short, run = recipe("training.steps=5", "evaluation.every_steps=3"), tmp_path / "run"
    real, lengths = fit_module.evaluate, [1.1, 1.2, 0.0, 1.3 if better else 1.0]

    def evaluating(*args):
        length = lengths.pop(0)
        if not length:
            raise TargetUnreachable("no server")
        return {**real(*args), "acceptance_length": length}

    monkeypatch.setattr(fit_module, "evaluate", evaluating)
    with pytest.raises(TargetUnreachable):
        train(short)
    assert fit_module.finished_before(short) is None
    notes = Notes()
    resumed = train(short, notes)
    assert (resumed.finished, resumed.already) == (True, False)
    assert [line["step"] for line in notes.evaluations] == [5]
    assert best_step(run) == (5 if better else 3)
    assert newest_checkpoint(run)[0].finished
    again = fit_module.finished_before(short)
    assert (again.finished, again.already, again.state) == (True, True, resumed.state)
    assert train(short).already
    assert lengths == []
    evaluations = [line["step"] for line in comparable(run) if "evaluation" in line]
    assert evaluations == [0, 3, 5]


def test_two_commands_cannot_train_the_same_run(recipe, tmp_path):
    training = set_up(recipe())
    with alone_in(tmp_path / "run"), pytest.raises(BadInput, match="another command is writing"):
        fit(training, Notes())
    assert list((tmp_path / "run").iterdir()) == []
    assert fit(training, Notes()).finished


def test_a_run_whose_directory_is_removed_stops_at_its_next_save(recipe, monkeypatch, tmp_path):
    stop_after(monkeypatch, 1, lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(BadInput, match="removed meanwhile"):
        train(recipe())
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_killed_at_its_very_start_starts_over(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.yaml.abcdefgh.tmp").touch()
    check_existing(recipe())
    assert train(recipe()).finished
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(BadInput, match="not a run of fledge"):
        check_existing(recipe(run="other"))


PEAGLE = ("objective.kind=peagle", "objective.num_depths=4", "draft.layers=2")
LAMBDA = ("objective.loss=lk_lambda", "objective.loss.scale=0.9")


@pytest.mark.parametrize("kind", [(), PEAGLE, LAMBDA], ids=["eagle3", "peagle", "lambda"])
def test_two_ranks_match_one(recipe, tmp_path, kind):
    """gloo on the CPU: the same packs, the same gradients, and the same weights up to rounding."""
    train(recipe(*kind, "training.micro_batch=2", run="one"))
    shared = recipe(*kind, "training.micro_batch=1", run="two")
    assert run_ranks(2, run_recipe, shared) == [0, 0]
    assert_close_drafts(tmp_path / "one", tmp_path / "two")
    for one_line, two_line in zip(
        comparable(tmp_path / "one"), comparable(tmp_path / "two"), strict=True
    ):
        if "loss" in one_line:
            assert two_line["loss"] == pytest.approx(one_line["loss"], rel=1e-5)
            assert two_line["supervised"] == one_line["supervised"]


class _Poisoned:
    """A target that answers NaN at chosen steps."""

    supports_async = False

    def __init__(self, inner, when):
        self.inner, self.when, self.calls = inner, when, 0

    def answer(self, rows):
        batch = self.inner.answer(rows)
        self.calls += 1
        if self.calls in self.when:
            batch.aux_hidden_states.fill_(float("nan"))
        return batch


def test_a_bad_step_is_skipped_and_reported(recipe):
    training = set_up(recipe("data.valid_rows=0", "training.epochs=3"))
    before = {n: p.clone() for n, p in training.draft.named_parameters()}
    training.parts.target = _Poisoned(training.parts.target, {2})
    notes = Notes()
    outcome = fit(training, notes)
    assert outcome.finished
    [skipped] = [note for note in notes.notes if "skipped" in note]
    assert "step 2 skipped: gradient norm nan" in skipped
    assert ".jsonl:" in skipped  # rows are prepared once by content, here or in another test
    assert "the target's answer is not finite in layer 0, row 0 (" in skipped
    for name, parameter in training.draft.named_parameters():
        assert torch.isfinite(parameter).all()
        if parameter.requires_grad:
            assert not torch.equal(parameter, before[name])


def test_too_many_bad_steps_end_the_run(recipe):
    training = set_up(recipe("data.valid_rows=0", "training.max_bad_steps=2"))
    training.parts.target = _Poisoned(training.parts.target, {2, 3, 4})
    with pytest.raises(BadInput, match="2 steps in a row were skipped: the target's answer"):
        fit(training, Notes())


def test_a_bad_answer_that_leaves_gradients_finite_is_still_a_bad_step(recipe):
    """The bad value is at a position that is not supervised and that no supervised one reads."""
    from fledge.data.pack import collate
    from fledge.training.batches import StepBatch
    from fledge.training.step import train_step

    training = set_up(recipe("data.valid_rows=0"))
    parts, rows = training.parts, training.stream.rows
    batch = collate(rows, training.stream._at(0)[1:], 96, 0)
    batch.loss_mask[:, -8:] = 0
    batch.attention_mask[:, -8:] = 1
    inner = parts.target.answer(batch)
    good = train_step(parts, StepBatch(0, 0, (batch,)), lr=0.0)
    assert not bool(good.bad)
    before = [p.clone() for p in parts.parameters]

    class Last:
        supports_async = False

        def answer(self, _):
            inner.last_hidden_states[0, -2] = float("inf")
            return inner

    parts.target = Last()
    result = train_step(parts, StepBatch(1, 0, (batch,)), lr=0.1)
    assert torch.isfinite(result.grad_norm)
    assert bool(result.bad)
    assert all(map(torch.equal, before, parts.parameters))


@pytest.mark.parametrize("asked_ahead", [False, True])
def test_a_run_that_fails_leaves_no_thread_behind(recipe, monkeypatch, asked_ahead):
    def failing(parts, batch, **more):
        raise RuntimeError("the device is gone")

    training = set_up(recipe("training.prefetch=2"))
    training.parts.target.supports_async = asked_ahead
    monkeypatch.setattr(fit_module, "train_step", failing)
    # `error` keeps the frames of the failed run alive
    with pytest.raises(RuntimeError, match="the device is gone") as error:
        fit(training, Notes())
    assert not [t for t in threading.enumerate() if t.name.startswith("fledge-batches")]
    assert error.traceback


def test_a_run_that_cannot_be_built_closes_its_target(recipe, monkeypatch, tmp_path):
    opened, real = [], building.open_target

    def open_target(*arguments):
        opened.append(real(*arguments))
        return opened[-1]

    monkeypatch.setattr(building, "open_target", open_target)
    with pytest.raises(BadInput, match="nowhere"):
        set_up(recipe(f"draft.init_from={tmp_path / 'nowhere'}"))
    [target] = opened
    with pytest.raises(RuntimeError, match="is closed"):
        target.info()


def test_an_existing_run_reports_which_field_differs(recipe):
    train(recipe())
    check_existing(recipe("checkpoint.keep=5", "tracking.every_steps=1"))  # free to change
    check_existing(recipe("data.train=moved.jsonl"))  # its content is checked by fingerprint
    with pytest.raises(BadInput, match=r"data\.valid_rows: 8 -> 9"):
        check_existing(recipe("data.valid_rows=9"))
    with pytest.raises(BadInput, match=r"training\.lr: 0\.003 -> 0\.5"):
        check_existing(recipe("training.lr=0.5"))


def test_a_finished_run_is_reported_without_loading_its_target(
    recipe, monkeypatch, capsys, tmp_path
):
    few = recipe("training.steps=5")
    assert run_recipe(few) == 0
    capsys.readouterr()

    def set_up(*_, **__):
        raise AssertionError("a finished run was set up again")

    monkeypatch.setattr(building, "set_up", set_up)
    before = layout(tmp_path / "run"), comparable(tmp_path / "run")
    assert run_recipe(few) == 0
    assert "already finished at step 5" in capsys.readouterr().out
    assert run_recipe(few, as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["finished"], result["already_finished"]) == (5, True, True)
    assert result["after"]["step"] == 5
    assert (layout(tmp_path / "run"), comparable(tmp_path / "run")) == before


def test_another_length_is_refused(recipe, monkeypatch):
    few, more = recipe("training.steps=5"), recipe("training.steps=12")
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        train(few)
    with pytest.raises(BadInput, match=r"another recipe: training\.steps: 5 -> 12"):
        check_existing(more)
    assert train(few).finished
    with pytest.raises(BadInput, match=r"steps: 5 -> 12.*draft.init_from="):
        check_existing(more)


def test_a_run_does_not_continue_on_different_data(recipe, tiny_chats, tmp_path):
    chats = tmp_path / "mine.jsonl"
    chats.write_text(tiny_chats.read_text())
    train(recipe(f"data.train={chats}"))
    lines = chats.read_text().splitlines(keepends=True)
    chats.write_text("".join(lines[:-1]))
    with pytest.raises(BadInput, match="the data is not what this run was started with"):
        train(recipe(f"data.train={chats}"))


def test_a_warm_start_keeps_the_vocabulary_map(recipe, tmp_path):
    train(recipe("training.epochs=6"))
    start = tmp_path / "run" / "best"
    notes = Notes()
    warm = set_up(recipe(f"draft.init_from={start}", "draft.draft_vocab_size=64", run="warm"))
    old = LlamaEagle3DraftModel.from_pretrained(start)
    assert torch.equal(warm.draft.selected_token_ids, old.selected_token_ids)
    assert 0 < warm.vocabulary.coverage <= 1
    assert warm.draft.config.aux_layer_ids == [0, 1, 2]
    with pytest.raises(BadInput, match=r"trained on the target's layers \[0, 1, 2\]"):
        set_up(recipe(f"draft.init_from={start}", "target.aux_layer_ids=0,1,3", run="other"))
    outcome = fit(warm, notes)
    assert outcome.state.first["tau"] > 1.0  # it starts from what was already learned
    assert notes.evaluations[0]["evaluation"]["tau"] == outcome.state.first["tau"]


def test_a_parallel_draft_can_start_from_an_eagle3_draft(recipe, tmp_path):
    train(recipe("training.epochs=6"))
    start = f"draft.init_from={tmp_path / 'run'}"  # a run stands for its best checkpoint
    grown = set_up(recipe(*PEAGLE, start, run="grown"))
    old = LlamaEagle3DraftModel.from_pretrained(tmp_path / "run" / "best")
    assert torch.equal(grown.draft.lm_head.weight, old.lm_head.weight)
    assert torch.equal(grown.draft.selected_token_ids, old.selected_token_ids)
    assert grown.draft.config.parallel_drafting
    outcome = fit(grown, Notes())
    assert outcome.state.first["tau"] > 1.0  # depth 0 predicts what the old draft did
    assert "mask_hidden" in load_file(tmp_path / "grown" / "best" / "model.safetensors")
    with pytest.raises(BadInput, match="a draft of P-EAGLE"):
        set_up(recipe(f"draft.init_from={tmp_path / 'grown' / 'best'}", run="back"))


# --- the best checkpoint -------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "options",
    [(), ("objective.kind=peagle", "objective.num_depths=3")],
    ids=["eagle3", "peagle"],
)
def test_logged_figures_match_the_saved_checkpoint(recipe, tmp_path, options):
    """Reloading the last checkpoint gives the figures that were measured at the run's last step."""
    training = set_up(recipe(*options))
    notes = Notes()
    fit(training, notes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    logged = [line["evaluation"] for line in lines if "evaluation" in line]
    assert logged == [values["evaluation"] for values in notes.evaluations]
    last = notes.evaluations[-1]
    assert 1.0 <= last["evaluation"]["acceptance_length"] <= 4.0
    assert len(last["evaluation"]["joint"]) == 3
    path = tmp_path / "run" / "checkpoints" / f"step-{last['step']:08d}"
    for weight in training.draft.parameters():
        weight.data.zero_()
    reloaded = LlamaEagle3DraftModel.from_pretrained(path).state_dict()
    training.draft.load_state_dict(reloaded)
    assert evaluate(training.parts, training.held_out) == last["evaluation"]
    assert last["evaluation"]["rounds"] > 8
