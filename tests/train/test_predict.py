"""The predicted time covers everything a run does, and a prediction leaves the run unchanged."""

import json

import pytest
import torch

from fledge.cli.console import out
from fledge.cli.plan import plan
from fledge.cli.train import run_recipe
from fledge.target.finite_check import NotFinite
from fledge.training.fit import fit
from fledge.training.planning import prediction as predict_module
from fledge.training.planning.prediction import PARTS, Pace, pace_of, predict, step_memory
from fledge.training.setup import set_up
from fledge.training.step import train_step
from live_bytes import LiveBytes
from train.test_fit import comparable, differing, final_weights, stop_after
from train.tiny import Notes

PACE = Pace(target_s=1e-3, step_s=1e-2, evaluation_s=11e-4)


@pytest.fixture
def paced(monkeypatch):
    """A machine with a known pace, whose steps and updates cost nothing else."""
    monkeypatch.setattr(predict_module, "pace_of", lambda *_: PACE)
    monkeypatch.setattr(predict_module, "STEP_SECONDS", {"cpu": 0.0})
    monkeypatch.setattr(predict_module, "UPDATE_BYTES", {"cpu": 1e18})


def pace_here(training):
    return pace_of(training, step_memory(training))


def counted(training):
    """Train, and return how many (steps, evaluations) there were."""
    events = []
    training.watch = lambda *event: events.append(event)
    fit(training, Notes())
    names = [event if done or event == "training" else "begins" for event, done, _ in events]
    return names.count("training"), names.count("begins")


def test_every_part_is_counted(recipe, paced):
    training = set_up(recipe("training.steps=11", "checkpoint.every_steps=3"))
    predicted = predict(training, begin=None).seconds_by_part
    assert tuple(predicted) == PARTS
    held_out = sum(int(batch.attention_mask.sum()) for batch in training.held_out)
    stream = training.stream
    tokens = stream.packs_per_step * stream.tokens * (1 - stream.padding_share)
    steps, evaluations = counted(training)
    assert (steps, evaluations) == (11, 4)  # before, 4, 8, 11
    assert predicted["steps"] == pytest.approx(steps * tokens * (PACE.target_s + PACE.step_s))
    assert predicted["evaluations"] == pytest.approx(held_out * evaluations * PACE.evaluation_s)
    weights = sum(p.numel() for p in training.draft.parameters())
    saved = 4 * weights + 8 * sum(p.numel() for p in training.parts.parameters)
    saves = 6  # 3, 4 (may be the best), 6, 8, 9, 11
    assert predicted["checkpoints"] == pytest.approx(saves * saved / predict_module.SAVE_BYTES)


def test_a_resumed_run_is_predicted_from_its_current_step(recipe, paced, monkeypatch):
    whole = predict(set_up(recipe("training.steps=11"))).seconds_by_part
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        step = fit(set_up(recipe("training.steps=11")), Notes()).state.step
    remaining = predict(set_up(recipe("training.steps=11"))).seconds_by_part
    assert remaining["steps"] == pytest.approx((11 - step) / 11 * whole["steps"])
    assert 0 < remaining["evaluations"] < whole["evaluations"]


def test_kept_states_are_computed_only_once(recipe, paced):
    kept, recomputed = (
        predict(set_up(recipe("training.epochs=9", f"target.keep_states_gb={size}", run=str(size))))
        for size in (1, 0)
    )
    rows = int(set_up(recipe()).stream.rows.lengths.sum())
    saved = recomputed.seconds_by_part["steps"] - kept.seconds_by_part["steps"]
    assert saved == pytest.approx(8 * rows * PACE.target_s, rel=0.05)
    assert kept.seconds_by_part["evaluations"] < recomputed.seconds_by_part["evaluations"]


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_trial_changes_nothing(recipe, tmp_path, kind):
    """Neither weights nor gradients, the random generator or the target's kept states."""
    options = (f"objective.kind={kind}", "target.keep_states_gb=1", "training.steps=3")
    options += ("evaluation.every_steps=100", "data.valid_rows=2")
    fit(set_up(recipe(*options, run="plain")), Notes())
    training = set_up(recipe(*options, run="tried"))
    state = torch.get_rng_state()
    pace = pace_here(training)
    assert min(vars(pace).values()) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in training.draft.parameters())
    assert training.parts.target.known == {}
    fit(training, Notes())
    assert differing(final_weights(tmp_path / "plain"), final_weights(tmp_path / "tried")) == []
    assert comparable(tmp_path / "plain") == comparable(tmp_path / "tried")


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves only when the target answers: by 7 s, and later by 1 s."""
    asked, now = [], [0.0]

    def of(training):
        target = training.parts.target
        real = target.answer

        def answer(rows):
            asked.append(float(rows.attention_mask.sum()))
            now[0] += 7.0 if len(asked) == 1 else 1.0
            return real(rows)

        monkeypatch.setattr(target, "answer", answer)
        monkeypatch.setattr(predict_module.time, "perf_counter", lambda: now[0])
        return asked

    return of


def test_the_pace_of_a_cpu_is_measured_now(recipe, ticking):
    """The first passes of a process do not count."""
    training = set_up(recipe())
    asked = ticking(training)
    assert pace_here(training).target_s == 1 / asked[1]
    assert len(asked) == 2


def test_a_broken_target_is_reported_by_the_run_not_the_prediction(recipe, monkeypatch):
    training = set_up(recipe())

    def answer(_):
        raise NotFinite("the target's states are not finite")

    monkeypatch.setattr(training.parts.target, "answer", answer)
    assert min(vars(pace_here(training)).values()) > 0  # from the number of operations


def test_the_speed_of_an_engine_on_a_gpu_is_measured(recipe, monkeypatch, ticking):
    """Its weights are not visible, so a prediction from them would make its answers free."""
    training = set_up(recipe())
    target = training.parts.target
    monkeypatch.setattr(type(target), "supports_async", True)  # its steps are not timed either
    monkeypatch.setattr(predict_module, "target_weights", lambda _: [])
    assert pace_here(training).target_s == 0.0
    counted = pace_here(training).step_s
    monkeypatch.setattr(target, "inside_engine", True)
    asked = ticking(training)
    pace = pace_here(training)
    assert len(asked) == 2
    assert (pace.target_s, pace.step_s) == (1 / asked[0], counted)


def test_plan_and_train_show_the_time_by_part(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(out, "_width", 200)
    (tmp_path / "recipe.yaml").write_text(recipe("training.steps=4").to_yaml())
    plan([str(tmp_path / "recipe.yaml")], as_json=True)
    planned = json.loads(capsys.readouterr().out)
    assert set(planned["seconds_by_part"]) == set(PARTS)
    assert planned["seconds"] == pytest.approx(sum(planned["seconds_by_part"].values()))
    plan([str(tmp_path / "recipe.yaml")])
    shown = capsys.readouterr().out
    assert all(part.replace("_", "-") in shown for part in PARTS)
    assert run_recipe(recipe("training.steps=4"), as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    parts = result["predicted"]["seconds_by_part"]
    assert set(parts) == set(PARTS)
    assert min(parts.values()) > 0
    assert result["measured"]["seconds"] > 0


BLOCKS = ("objective.listened_layers=3", "draft.draft_vocab_size=null")
RUNS = {
    "eagle3": [],
    "eagle3, depth_keep": ["objective.depth_keep=0.3"],
    "peagle": ["objective.kind=peagle"],
    "peagle, few": ["objective.kind=peagle", "objective.down_sample_ratio=0.2"],
    "eagle1": ["objective.kind=eagle1", "draft.draft_vocab_size=null"],
    "mtp": ["objective.kind=mtp"],
    "dflash": ["objective.kind=dflash", *BLOCKS],
    "dspark": ["objective.kind=dspark", *BLOCKS],
}


@pytest.mark.parametrize("name", RUNS)
def test_predicted_memory_is_close_to_that_of_a_step(recipe, name):
    """Within a half: the target is so small that temporary tensors are a large part, and on a CPU
    norms keep copies that are not counted."""
    training = set_up(recipe(*RUNS[name], "packing.tokens=512", "training.steps=2"))
    predicted = predict(training).peak_bytes
    train_step(training.parts, training.stream.batch(0), lr=1e-4)  # makes the moments
    with LiveBytes() as live:
        train_step(training.parts, training.stream.batch(1), lr=1e-4)
    assert 1 / 2 < predicted / live.peak < 4 / 3


def test_the_rate_of_a_run_is_that_of_what_it_samples(recipe, monkeypatch):
    """Where nothing is timed, as on a GPU."""

    def pace(*options, **values):
        changes = [f"objective.{name}={value}" for name, value in values.items()]
        training = set_up(recipe(*options, *changes, run="-".join([*changes, *options])))
        monkeypatch.setattr(type(training.parts.target), "supports_async", True)
        return pace_here(training)

    peagle = [pace("objective.kind=peagle", down_sample_ratio=ratio) for ratio in (0.2, 0.5, 1.0)]
    eagle3 = [pace(depth_keep=keep) for keep in (0.3, 0.7, 1.0)]
    for paces in (peagle, eagle3):
        steps = [pace.step_s for pace in paces]
        assert steps == sorted(set(steps))
        assert len({pace.target_s for pace in paces}) == 1
