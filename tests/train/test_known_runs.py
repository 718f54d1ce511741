"""Forecasts guided by known runs: right where the truth is known, and guided by the right runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from collect_curves import upto
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe
from fledge.report.page import gather
from fledge.training.curves import Kind, Known, known_runs, read_curve
from fledge.training.forecast import forecast, length_of, log_odds, rate_of
from train.curve_files import made, real_curve, written
from train.tiny import recipe_for


def shifted(curve, by):
    """The same run with a constant added to its log-odds."""

    def shift(length):
        odds = log_odds(rate_of(np.array([length]), curve.depths)) + by
        return float(length_of(1 / (1 + np.exp(-odds)), curve.depths)[0])

    return replace(
        curve,
        measured=tuple((at, shift(length), rounds) for at, length, rounds in curve.measured),
    )


REAL = ("h200_e3_8m_shipped_0", "h200_e3_25m_automodel_0", "cpu_stories_constant")


# --- what is forecast -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("by", [-0.3, -0.1, 0.0, 0.2])
def test_a_twin_run_predicts_the_end(name, by):
    """Whatever its level: only the shape of its curve counts."""
    curve = real_curve(name)
    truth, early = curve.measured[-1][1], upto(curve, 0.2)
    ahead = forecast(early, known=[Known("twin", shifted(curve, by))])
    assert ahead.end.length == pytest.approx(truth, rel=1e-6)
    assert ahead.end.low < truth < ahead.end.high
    assert ahead.by == ("twin",)
    assert ahead.by_whom() == "by the course of twin"


def test_a_known_run_that_ended_earlier_has_no_influence():
    short, long = real_curve("h200_e3_8m_shipped_0"), upto(real_curve("h200_e3_25m_shipped_0"), 0.2)
    ahead = forecast(long, known=[Known("short", short)])
    assert ahead == forecast(long)
    assert ahead.by == ()


def test_known_runs_that_disagree_widen_the_interval():
    early = upto(real_curve("h200_e3_8m_shipped_0"), 0.2)
    twin = Known("twin", real_curve("h200_e3_8m_shipped_0"))
    other = Known("other", real_curve("h200_e3_25m_automodel_0"))
    alone, both = (forecast(early, known=known).end for known in ([twin], [twin, other]))
    assert both.high - both.low > alone.high - alone.low
    assert both.length != alone.length


def test_two_runs_with_the_same_name_both_count():
    early = upto(real_curve("h200_e3_8m_shipped_0"), 0.2)
    seeds = [Known("draft", real_curve(f"h200_e3_8m_shipped_{seed}")) for seed in (1, 2)]
    ahead = forecast(early, known=seeds)
    assert ahead.by == ("draft", "draft")
    assert ahead.end != forecast(early, known=seeds[1:]).end


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99, 1.0])
def test_forecasts_guided_by_strange_runs_are_finite(share):
    """The known runs were hardly measured, or are nothing like this one."""
    curve = made(0.7, -0.3, "cosine")
    hardly = replace(curve, measured=curve.measured[-1:])
    flat = replace(curve, measured=tuple((at, 1.0, 1) for at, _, _ in curve.measured))
    known = [Known("hardly", hardly), Known("flat", flat)]
    ahead = forecast(upto(curve, share), known=known)
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
    return written(place / name, upto(curve, share), recipe)


def names(run, like=()):
    return {known.name for known in known_runs(run, like)}


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
    assert names(run) == {"seed"}
    far = tmp_path / "elsewhere" / "far"
    assert [known.name for known in known_runs(run, [far, far])] == ["far"]
    assert names(run, [tmp_path / "model"]) == {"model"}


def test_the_command_names_the_guiding_runs(tmp_path):
    run, other = run_in(tmp_path / "a", "run", share=0.4), run_in(tmp_path / "b", "other")
    alone = json.loads(CliRunner().invoke(app, ["forecast", str(run), "--json"]).output)
    assert alone["by"] == []
    assert alone["end"] == vars(forecast(read_curve(run)).end)
    words = ["forecast", str(run), "--like", str(other)]
    guided = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert guided["by"] == ["other"]
    assert guided["end"]["length"] == pytest.approx(read_curve(other).measured[-1][1], rel=1e-6)
    assert "by the course of other" in CliRunner().invoke(app, words).output
    beside = run_in(tmp_path / "a", "beside")
    ahead = gather(run)["forecast"]  # the report uses the runs in sibling directories
    assert ahead["by_whom"] == f"by the course of {beside.name}"
    assert ahead["end"] == guided["end"]


@pytest.mark.parametrize("what", ["nowhere", "empty", "unfinished", "eagle1", "unmeasured"])
def test_an_unusable_known_run_is_refused_in_one_line(tmp_path, what):
    run = run_in(tmp_path, "run", share=0.4)
    (tmp_path / "empty").mkdir()
    run_in(tmp_path, "unfinished", share=0.5)
    run_in(tmp_path, "eagle1", overrides=["objective.kind=eagle1"])
    lines = (run_in(tmp_path, "unmeasured") / "metrics.jsonl").read_text().splitlines()
    kept = "\n".join(text for text in lines if "evaluation" not in text)
    (tmp_path / "unmeasured" / "metrics.jsonl").write_text(kept)
    with pytest.raises(BadInput, match=r"not a (finished )?run of") as refused:
        known_runs(run, [tmp_path / what])
    assert what in str(refused.value)


def test_settings_are_everything_but_seed_length_and_output():
    def settings(*overrides):
        return Kind.of(load_recipe("smollm2_gpu", overrides)).settings

    plain = settings()
    assert plain == settings("training.seed=3", "training.steps=7", "run.output_dir=x")
    for override in ("training.lr=1e-3", "packing.tokens=8192", "draft.draft_vocab_size=8192"):
        assert settings(override) != plain
