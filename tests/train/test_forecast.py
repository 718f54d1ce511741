"""Forecasts: right where the truth is known, sane on any input, and as accurate on real runs as
documented."""

import json
import math
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from collect_curves import compact, curve_from, upto
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe
from fledge.training.curves import Course, read_curve
from fledge.training.forecast import Estimate, Forecast, forecast, length_of, limits_of, rate_of
from fledge.training.optimizer import learning_rate
from train.curve_files import TAU, made, real_curves, written
from train.tiny import recipe_for


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("slope", "level", "seed"), [(0.45, -0.8, 0), (0.45, 0.3, 1), (0.7, -0.2, 2), (0.95, 0.0, 3)]
)
def test_a_run_that_follows_the_law_is_forecast_correctly(slope, level, schedule, seed):
    curve = made(slope, level, schedule, noise=0.01, seed=seed)
    truth = curve.measured[-1][1]
    ahead = forecast(upto(curve, 0.2))
    assert ahead.end.low < truth < ahead.end.high
    assert abs(ahead.end.length / truth - 1) < 0.08
    # the later the forecast, the narrower its interval
    later = forecast(upto(curve, 0.7))
    assert abs(later.end.length / truth - 1) < 0.06
    assert later.end.high - later.end.low < ahead.end.high - ahead.end.low


@settings(max_examples=25)
@given(
    slope=st.floats(-0.2, 1.5),
    level=st.floats(-1.2, 1.5),
    noise=st.floats(0.0, 0.05),
    share=st.floats(0.15, 1.0),
    seed=st.integers(0, 9),
)
def test_forecasts_are_sane(slope, level, noise, share, seed):
    """Finite, ordered, at most what can be drafted, and never falling as training goes on."""
    curve = upto(made(slope, level, "cosine", noise=noise, seed=seed), share)
    assume(rate_of(np.array([curve.measured[-1][1]]), curve.depths)[0] >= 0.2)
    ahead = forecast(curve)
    estimates = [ahead.end, ahead.twice_data, ahead.twice_time, *(point for _, point in ahead.path)]
    for estimate in estimates:
        assert all(map(math.isfinite, (estimate.low, estimate.length, estimate.high)))
        assert 1 <= estimate.low <= estimate.length <= estimate.high <= curve.depths + 1
    lengths = [estimate.length for _, estimate in ahead.path]
    assert all(after >= before - 1e-9 for before, after in pairwise(lengths))
    assert ahead.twice_data.length >= ahead.twice_time.length - 1e-9 >= 0
    assert ahead.end.length > (1 - 0.02 - 2 * noise) * min(m[1] for m in curve.measured[-3:])
    assert forecast(curve) == ahead  # deterministic


def test_lengths_and_rates_are_inverse():
    rates = np.linspace(0.01, 0.99, 50)
    for depths in (1, 3, 7, 16):
        assert np.allclose(rate_of(length_of(rates, depths), depths), rates, atol=1e-9)


def test_a_course_follows_the_recipe():
    """Every field of the schedule is passed on: a missing one would silently spoil the forecast."""
    overrides = ["training.schedule=wsd", "training.decay_share=0.5", "training.final_lr_share=0.1"]
    recipe = load_recipe(None, [*overrides, "training.warmup_steps=4", "training.lr=1"])
    steps, rates = Course.of(recipe, 100, epoch_steps=math.inf).rates()
    expected = [
        learning_rate(
            int(step), 100, peak=1.0, warmup=4, schedule="wsd", final_share=0.1, decay_share=0.5
        )
        for step in steps
    ]
    assert rates.tolist() == expected
    assert rates[49] == 1.0 > rates[52]


def test_repeated_rows_are_worth_less_than_new_ones():
    curve = made(0.8, 0.0, "cosine")
    curve = upto(replace(curve, course=replace(curve.course, epoch_steps=100.0)), 0.6)
    ahead = forecast(curve)
    assert ahead.twice_data.length > ahead.twice_time.length > ahead.end.length


def test_when_to_stop():
    curve = upto(made(0.6, 0.3, "constant"), 0.5)
    short = replace(curve, seconds=60.0)
    assert forecast(short).stop_at is None  # minutes: nothing is gained by less
    long = replace(curve, seconds=1e7)
    assert forecast(long).stop_at == curve.step  # months: stop now
    hours = replace(curve, seconds=36_000.0)
    rates = {
        begin: 100 * (later.length / now.length - 1) / (10.0 / 500 * (end - begin))
        for (begin, now), (end, later) in pairwise(forecast(hours).path)
    }
    stop = forecast(hours).stop_at
    assert curve.step < stop < 1000
    assert all((rate < 1.0) == (step >= stop) for step, rate in rates.items())


def test_forecasts_of_real_runs():
    """As accurate for the runs in tests/train/curves as benchmarks/results/forecast.md states."""
    curves = real_curves()
    assert len(curves) >= 20
    for share, allowed in ((0.2, 7.0), (0.4, 3.0), (0.6, 1.6), (0.8, 1.0)):
        errors, inside = [], []
        for curve in curves.values():
            try:
                end = forecast(upto(curve, share)).end
            except BadInput:
                continue
            truth = curve.measured[-1][1]
            errors.append(100 * abs(end.length / truth - 1))
            inside.append(end.low <= truth <= end.high)
        assert len(errors) >= (15 if share == 0.2 else 18)
        assert statistics.median(errors) < allowed, (share, errors)
        assert statistics.mean(inside) >= 0.8, share


# --- runs in directories --------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    overrides = ("training.steps=1000", "training.warmup_steps=20")
    recipe = recipe_for("target", "chats.jsonl", tmp_path / "run", *overrides)
    (tmp_path / "run").mkdir()
    curve = upto(made(0.8, -0.3, "cosine", depths=3), 0.4)
    return written(tmp_path / "run", curve, recipe)


def fledge(*words):
    return CliRunner().invoke(app, ["forecast", *map(str, words)])


def test_a_curve_read_back_from_files_is_the_same(run):
    curve = upto(made(0.8, -0.3, "cosine", depths=3), 0.4)
    loaded = read_curve(run)
    assert loaded.course == replace(curve.course, final_share=0.0)
    assert loaded.measured == curve.measured
    assert loaded.step == 400
    assert curve_from(json.loads(json.dumps(compact(loaded)))).measured


def test_the_forecast_command(run):
    result = fledge(run, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    ahead = forecast(read_curve(run))
    assert figures["end"] == vars(ahead.end)
    assert {limit["name"] for limit in figures["limits"]} >= {"training", "depth"}
    shown = fledge(run).output
    for text in (f"{ahead.end.length:.2f}", "twice the data", "step 400 of 1,000"):
        assert text in shown
    assert "worth it to the end" in shown


def test_a_run_that_cannot_be_forecast_is_refused_in_one_line(run, tmp_path):
    def refused(place, *words):
        result = CliRunner().invoke(app, ["forecast", str(place), *words])
        assert isinstance(result.exception, BadInput)
        return str(result.exception)

    assert "no such run" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no metrics.jsonl" in refused(tmp_path / "empty")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    early = [line for line in lines if json.loads(line)["step"] < 50]
    (run / "metrics.jsonl").write_text("\n".join(early))
    assert "too early for a forecast: no held-out evaluation" in refused(run)
    (run / "metrics.jsonl").write_text("\n".join(lines))
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("steps: 1000", "steps: null"))
    assert "no checkpoint says how many steps" in refused(run)


def test_limits_name_their_cause_and_cost(run, tmp_path):
    """Each limit names its cause in the files and the acceptance length it costs."""
    curve = upto(made(0.8, -0.3, "cosine", depths=3), 0.4)
    recipe = recipe_for("target", "chats.jsonl", run, "training.steps=1000")
    written(run, curve, recipe, joint=(0.6, 0.18, 0.018), epochs=3)
    ahead = forecast(read_curve(run))
    limits = {limit.name: limit for limit in limits_of(run, ahead)}
    assert limits["data"].gain == pytest.approx(100 * (TAU / 2.0 - 1))
    assert [*limits.values()] == sorted(limits.values(), key=lambda limit: -limit.gain)


def test_a_small_vocabulary_is_a_limit(run, tmp_path):
    from fledge.data.vocab import DraftVocabulary

    ids = np.arange(64, dtype=np.int64)
    DraftVocabulary(ids, 128, 0.9, "rows").save(run / "vocabulary.safetensors")
    ahead = forecast(read_curve(run))
    [limit] = [limit for limit in limits_of(run, ahead) if limit.name == "vocabulary"]
    rate = rate_of(np.array([ahead.measured]), 3)
    assert limit.gain == pytest.approx(100 * (length_of(rate / 0.9, 3)[0] / ahead.measured - 1))
    assert "10.00%" in limit.says


def test_a_finished_run_is_forecast_as_measured():
    curve = made(0.6, 0.0, "cosine")
    ahead = forecast(curve)
    assert isinstance(ahead, Forecast)
    assert ahead.finished
    last = curve.measured[-1][1]
    assert ahead.end == Estimate(last, last, last)
    assert ahead.path == ()
    assert ahead.twice_data.length > last
