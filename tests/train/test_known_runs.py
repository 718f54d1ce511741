"""Forecasts guided by known runs: right where the truth is known, and guided by the right runs."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.cli.main import run as command
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe
from fledge.report.gather import gather
from fledge.train.fit import fit
from fledge.train.forecast import forecast as forecasting
from fledge.train.forecast import known_runs as known_files
from fledge.train.forecast.curves import Curve, read_curve
from fledge.train.forecast.forecast import forecast
from fledge.train.forecast.formula import MISFIT, length_of, log_odds, rate_of
from fledge.train.forecast.guides import OTHER_SETTINGS, Known
from fledge.train.forecast.known_runs import Kind, known_runs
from fledge.train.setup import set_up
from train.curve_files import made, real_curve, written
from train.tiny import Notes, recipe_for


def shifted(curve, by):
    """The same run with a constant added to its log-odds."""

    def shift(length, depths, times):
        odds = log_odds(rate_of(np.array([length]), depths)) + by * times
        return float(length_of(1 / (1 + np.exp(-odds)), depths)[0])

    return replace(
        curve,
        windows=tuple((at, shift(tau, curve.trained_depths, 1.35)) for at, tau in curve.windows),
        measured=tuple(
            (at, shift(length, curve.depths, 1.0), rounds) for at, length, rounds in curve.measured
        ),
    )


REAL = ("h200_e3_8m_shipped_0", "h200_e3_25m_automodel_0", "cpu_stories_constant")


# --- what is forecast -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_a_twin_run_predicts_the_end(name):
    """To about a thousandth: the run's own formula always keeps a little weight."""
    curve = real_curve(name)
    truth, early = curve.measured[-1][1], curve.upto(0.2)
    ahead = forecast(early, known=[Known("twin", curve)])
    assert ahead.end.length == pytest.approx(truth, rel=0.002)
    assert ahead.end.low < truth < ahead.end.high
    [voice] = ahead.by
    assert voice.name == "twin"
    assert voice.share > 0.97
    assert "by the course of twin" in ahead.line()
    # with other settings the same curve may be a coincidence: the formula gets more weight
    other = forecast(early, known=[Known("other", curve, OTHER_SETTINGS)])
    assert 0.5 < other.by[0].share < voice.share
    assert abs(other.end.length / truth - 1) < 0.5 * abs(forecast(early).end.length / truth - 1)
    assert other.end.high - other.end.low > ahead.end.high - ahead.end.low


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("by", [-0.3, -0.1, 0.2])
def test_a_constant_offset_is_removed(name, by):
    """Of a run with the same settings, only the shape of its curve counts."""
    curve = real_curve(name)
    early = curve.upto(0.2)
    end = forecast(early, known=[Known("shifted", shifted(curve, by))]).end
    assert end.length == pytest.approx(curve.measured[-1][1], rel=0.002)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("pace", [-0.3, 0.3])
def test_a_different_pace_is_recognized(name, pace):
    """A run with other settings that followed the same curve in fewer or more steps."""
    curve, times = real_curve(name), math.exp(pace)
    course = curve.course
    known = replace(
        curve,
        course=replace(
            course,
            steps=round(times * course.steps),
            warmup=round(times * course.warmup),
            epoch_steps=times * course.epoch_steps,
        ),
        windows=tuple((times * at, tau) for at, tau in curve.windows),
        measured=tuple((round(times * at), *rest) for at, *rest in curve.measured),
        step=round(times * curve.step),
    )
    truth, early = curve.measured[-1][1], curve.upto(0.2)
    fitted_error, unfitted_error = (
        abs(forecast(early, known=[Known("other", known, misfit)]).end.length / truth - 1)
        for misfit in (1e-3, 0.0)
    )
    assert fitted_error < 0.5 * unfitted_error
    assert fitted_error < 0.03


@pytest.mark.parametrize(
    ("share", "names", "wanted"),
    [
        (0.2, ["8m_shipped_0"], (2.8896, 2.6527, 3.1472, [0.9644])),
        (0.4, ["8m_automodel_0", "25m_shipped_0"], (2.8592, 2.6675, 3.0648, [0.8266])),
    ],
)
def test_the_documented_figures_of_a_real_run(share, names, wanted):
    """The figures from which the tables of benchmarks/results/forecast.md were made."""
    known = [
        Known(name, real_curve(f"h200_e3_{name}"), OTHER_SETTINGS if "auto" in name else 0.0)
        for name in names
    ]
    ahead = forecast(real_curve("h200_e3_8m_shipped_1").upto(share), known=known)
    end = ahead.end
    assert (end.length, end.low, end.high) == pytest.approx(wanted[:3], abs=1e-4)
    assert [voice.share for voice in ahead.by] == pytest.approx(wanted[3], abs=1e-4)


def test_without_known_runs_nothing_changes():
    """The figures of benchmarks/results/forecast.md from before known runs were used."""
    for name, length, low, high in (
        ("h200_e3_8m_shipped_0", 2.5205, 2.1553, 2.9676),
        ("h200_smollm2_eagle1", 2.9332, 2.5752, 3.3378),
    ):
        end = forecast(real_curve(name).upto(0.2)).end
        assert (end.length, end.low, end.high) == pytest.approx((length, low, high), abs=1e-4)


def test_a_known_run_that_ended_earlier_has_no_influence():
    short, long = real_curve("h200_e3_8m_shipped_0"), real_curve("h200_e3_25m_shipped_0").upto(0.2)
    ahead = forecast(long, known=[Known("short", short)])
    assert ahead == forecast(long)
    assert ahead.by == ()
    assert "course" not in ahead.line()


def test_the_nearest_run_has_the_most_influence():
    curve, early = real_curve("h200_e3_8m_shipped_0"), real_curve("h200_e3_8m_shipped_0").upto(0.2)
    other = Known("other", real_curve("h200_e3_25m_automodel_0"), OTHER_SETTINGS)
    ahead = forecast(early, known=[other, Known("twin", curve)])
    assert ahead.by[0].name == "twin"
    assert sum(voice.share for voice in ahead.by) <= 1 + 1e-9
    # known runs that disagree widen the interval
    strange = Known("strange", shifted(real_curve("cpu_stories_chain_slow"), 0.5), OTHER_SETTINGS)
    disagreeing = forecast(early, known=[other, strange]).end
    assert disagreeing.high - disagreeing.low > 0.1
    assert all(map(math.isfinite, (disagreeing.low, disagreeing.length, disagreeing.high)))


def test_two_runs_with_the_same_name_both_count():
    early = real_curve("h200_e3_8m_shipped_0").upto(0.2)
    seeds = [Known("draft", real_curve(f"h200_e3_8m_shipped_{seed}")) for seed in (1, 2)]
    ahead = forecast(early, known=seeds)
    assert [voice.name for voice in ahead.by] == ["draft", "draft"]
    assert ahead.end != forecast(early, known=seeds[1:]).end


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99, 1.0])
def test_forecasts_guided_by_strange_runs_are_finite(share):
    """The known runs were hardly measured, or are nothing like this one."""
    curve = made(0.7, -0.3, "cosine")
    hardly = replace(curve, measured=curve.measured[-1:], windows=curve.windows[-6:])
    flat = replace(curve, measured=tuple((at, 1.0, 1) for at, _, _ in curve.measured))
    known = [Known("hardly", hardly), Known("flat", flat, MISFIT)]
    ahead = forecast(curve.upto(share), known=known)
    for estimate in (
        ahead.end, ahead.twice_data, ahead.twice_time, *(point for _, point in ahead.path),
    ):  # fmt: skip
        assert 1 <= estimate.low <= estimate.length <= estimate.high <= curve.depths + 1


# --- which runs -----------------------------------------------------------------------------------


def run_in(place, name, *, share=1.0, overrides=(), target="target"):
    base = ("training.steps=1000", "training.warmup_steps=20")
    recipe = recipe_for(target, "chats.jsonl", place / name, *base, *overrides)
    (place / name).mkdir(parents=True)
    curve = made(0.8, -0.3, "cosine", depths=3)
    return written(place / name, curve.upto(share), recipe)


def names(run, like=()):
    return {known.name: known.misfit for known in known_runs(run, like)}


def test_runs_in_sibling_directories_are_found(tmp_path):
    run = run_in(tmp_path, "run", share=0.4)
    run_in(tmp_path, "seed", overrides=["training.seed=1", "training.epochs=3"])
    run_in(tmp_path, "faster", overrides=["training.lr=1e-2"])
    run_in(tmp_path, "unfinished", share=0.5)
    run_in(tmp_path, "block", overrides=["objective.kind=eagle1"])
    run_in(tmp_path, "model", target="other")
    run_in(tmp_path / "elsewhere", "far")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("{")
    assert names(run) == {"seed": 0.0, "faster": OTHER_SETTINGS}
    far = tmp_path / "elsewhere" / "far"
    assert names(run, [far, far]) == {"far": 0.0}
    assert names(run, [tmp_path / "model"]) == {"model": MISFIT}


def test_the_command_names_the_guiding_runs(tmp_path):
    run, other = run_in(tmp_path / "a", "run", share=0.4), run_in(tmp_path / "b", "other")
    alone = json.loads(CliRunner().invoke(app, ["forecast", str(run), "--json"]).output)
    assert alone["by"] == []
    assert alone["end"] == vars(forecast(read_curve(run)).end)
    words = ["forecast", str(run), "--like", str(other)]
    guided = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    [voice] = guided["by"]
    assert voice["name"] == "other"
    assert voice["share"] > 0.9
    assert guided["end"]["length"] == pytest.approx(read_curve(other).measured[-1][1], rel=0.002)
    assert "by the course of other" in CliRunner().invoke(app, words).output
    beside = run_in(tmp_path / "a", "beside")
    ahead = gather(run)["forecast"]  # the report uses the runs in sibling directories
    assert ahead["by_whom"] == f"by the course of {beside.name}"
    assert ahead["end"] == guided["end"]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("nowhere", "no such run"),
        ("empty", "not a run of fledge"),
        ("unfinished", "not finished: step 500 of 1,000; give --like runs that are finished"),
        ("eagle1", "a run of another method ('eagle1', not 'eagle3')"),
        ("unmeasured", "no held-out evaluation"),
    ],
)
def test_an_unusable_known_run_is_refused_in_one_line(tmp_path, what, line, monkeypatch, capsys):
    run = run_in(tmp_path, "run", share=0.4)
    (tmp_path / "empty").mkdir()
    run_in(tmp_path, "unfinished", share=0.5)
    run_in(tmp_path, "eagle1", overrides=["objective.kind=eagle1"])
    lines = (run_in(tmp_path, "unmeasured") / "metrics.jsonl").read_text().splitlines()
    kept = "\n".join(text for text in lines if "evaluation" not in text)
    (tmp_path / "unmeasured" / "metrics.jsonl").write_text(kept)
    monkeypatch.setattr(
        "sys.argv", ["fledge", "forecast", str(run), "--like", str(tmp_path / what)]
    )
    with pytest.raises(SystemExit) as exit_info:
        command()
    stderr = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert "Traceback" not in stderr
    with pytest.raises(BadInput, match=re.escape(line)) as refused:
        known_runs(run, [tmp_path / what])
    assert what in str(refused.value)


def test_training_is_guided_by_runs_in_sibling_directories(
    tiny_target, tiny_chats, tmp_path, monkeypatch
):
    monkeypatch.setattr(forecasting, "_LEAST_RATE", 0.0)  # the tiny target's drafts hardly learn
    monkeypatch.setattr(forecasting, "_WORTH_NAMING", 0.0)  # and no two of their curves are alike
    forecasts = []
    for seed in (0, 1):
        overrides = ("tracking.every_steps=1", f"training.seed={seed}")
        notes = Notes()
        fit(
            set_up(recipe_for(tiny_target, tiny_chats, tmp_path / f"seed{seed}", *overrides)), notes
        )
        forecasts.append(notes.evaluations[-2]["forecast"])
    assert "by the course" not in forecasts[0]
    assert forecasts[1].endswith("by the course of seed0")


def test_shipped_curves_match_those_of_the_tests(tmp_path):
    shipped = json.loads(Path(known_files.__file__).with_suffix(".json").read_text())
    for entry in shipped:
        assert Curve.from_json(entry["curve"]) == real_curve(entry["from"])
    run = run_in(tmp_path, "run", share=0.4, target="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert names(run) == {"smollm2_gpu on an H200, 25 M tokens": MISFIT}
    run_in(tmp_path, "beside", target="smollm2-135m-instruct")
    assert names(run) == {"beside": 0.0}  # a sibling run takes precedence


def test_settings_are_everything_but_seed_length_and_output():
    def settings(*overrides):
        return Kind.of(load_recipe("smollm2_gpu", overrides)).settings

    plain = settings()
    assert plain == settings("training.seed=3", "training.steps=7", "run.output_dir=x")
    for override in ("training.lr=1e-3", "packing.tokens=8192", "draft.draft_vocab_size=8192"):
        assert settings(override) != plain
