"""The report in a real browser: opens from disk, sends no requests, shows the files' figures."""

import json
import re

import pytest
from typer.testing import CliRunner

from collect_curves import upto
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.report.page import MOST_POINTS, gather, render
from report.test_report_looks import TOUCHING
from train.curve_files import real_curve
from train.tiny import recipe_for


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_from_disk_without_errors_or_requests(run, page, scheme):
    page.requests.clear()
    page.open(run / "report.html", scheme)
    outside = [url for url in page.requests if not url.startswith("data:")]
    assert outside == [(run / "report.html").absolute().as_uri()]
    headings = page.run("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert headings == [
        "What the draft knows", "Acceptance", "Held-out acceptance over time", "Training", "Recipe",
        "Machine",
    ]  # fmt: skip
    background = page.run("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 3 * 128
    assert light == (scheme == "light")
    assert page.run("document.querySelectorAll('svg.chart path').length") >= 8


def test_it_shows_the_figures_of_the_files(run, page):
    figures = json.loads((run / "eval.json").read_text())["drafts"][0]
    page.open(run / "report.html")
    cards = page.run("[...document.querySelectorAll('.card')].map((c) => c.innerText)")
    assert f"{figures['acceptance_length']:.2f}" in cards[0]
    data = gather(run)
    assert data["method"] == "EAGLE-3"  # its title, not its name in the recipe
    held_out = data["held_out"]
    assert any(f"{held_out['length'][held_out['best']]:.2f}" in card for card in cards)
    bars = page.run("[...document.querySelectorAll('.bars')].map((b) => b.innerText).join('|')")
    for name, part in figures["by_category"].items():
        assert name in bars
        assert f"{part['acceptance_length']:.2f}" in bars
    for cause in figures["where_it_fails"]["causes"].values():
        assert f"{cause['rejected']:,} of {cause['judged']:,} rejected" in bars
    text = page.text()
    assert figures["where_it_fails"]["remedy"][1:] in text
    assert figures["definition"][1:] in text
    assert len(figures["joint"]) == 3  # the number of depths the run trained
    assert "ttt_steps" in text
    assert figures["samples"][0]["prompt"] in text


def test_every_token_has_the_color_of_its_author(run, page, tmp_path):
    data = gather(run)
    samples = data["evaluation"]["drafts"][0]["samples"]
    for index, token in enumerate(samples[1]["tokens"]):  # as of a better draft than the tiny one
        token[1] = index % 10
    page.show(render(data), tmp_path)
    for index, sample in enumerate(samples):
        page.run(f"document.querySelectorAll('.tabs button')[{index}].click()")
        shown = page.run(
            "[...document.querySelectorAll('.said > .t')].map((t) => [t.textContent,"
            " +t.dataset.depth, +t.dataset.round, getComputedStyle(t).backgroundColor])"
        )
        clear = "rgba(0, 0, 0, 0)"
        assert [row[0].replace("⏎", "") for row in shown] == [t[0] for t in sample["tokens"]]
        assert [row[1:3] for row in shown] == [t[1:3] for t in sample["tokens"]]
        assert all((color != clear) == (depth > 0) for _, depth, _, color in shown)
        if index == 1:
            colors = {min(depth, 8): color for _, depth, _, color in shown}
            assert len(set(colors.values())) == 9  # eight depths, and the target's own tokens


def test_pointing_at_a_token_shows_both_probabilities(run, page):
    page.open(run / "report.html")
    page.point_at(".said > .t.own:not(.first)")
    tip = page.text("#tip")
    assert page.run("document.getElementById('tip').hidden") is False
    assert "the target's own" in tip
    assert "target's probability" in tip
    page.point_at("svg.chart .hover")
    assert "step" in page.text("#tip")
    page.run("document.querySelectorAll('.switch button')[1].click()")
    assert page.run("document.querySelector('.switch button:last-child').ariaPressed") == "true"
    assert page.complaints == []


def test_it_fits_a_phone_screen(run, page):
    page.open(run / "report.html", width=390, height=800)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_texts_cannot_inject_markup(run, page, tmp_path):
    """Whatever a model writes stays text: in the data, the title and the tokens."""
    evil = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>{{style}}"
    data = gather(run)
    data["name"] = evil
    data["evaluation"]["drafts"][0]["samples"][0]["tokens"][0][0] = evil
    data["training"]["loss"][1] = float("nan")
    page.show(render(data), tmp_path)
    assert page.run("document.title") == f"{evil} · fledge report"
    assert page.run("document.querySelector('h1').textContent") == evil
    assert page.run("document.querySelector('.said .t').textContent") == evil
    assert page.run("document.querySelectorAll('img').length") == 0


def test_a_run_without_measurements(run, page, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b'{"step": 9')
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "x.html")])
    assert result.exit_code == 0, result.output
    page.open(tmp_path / "x.html")
    text = page.text()
    assert "fledge eval RUN --out RUN/eval.json" in text
    assert "Held-out acceptance over time" in text


def test_a_disturbed_measurement_shows_no_speed_up(run, page, tmp_path):
    figures = json.loads((run / "eval.json").read_text())
    speed = figures["drafts"][0]["speed"]
    missing = [
        name for name in speed if "speedup" in name or "break_even" in name or "_per_s" in name
    ]
    speed |= {"disturbed": True, **dict.fromkeys(missing)}
    (tmp_path / "eval.json").write_text(json.dumps(figures))
    options = ["--eval", str(tmp_path / "eval.json"), "--out", str(tmp_path / "x.html")]
    result = CliRunner().invoke(app, ["report", str(run), *options])
    assert result.exit_code == 0, result.output
    page.open(tmp_path / "x.html")
    text = page.text()
    assert "The clock was disturbed" in text
    assert "measured speed-up" not in text


def test_a_draft_with_calibrated_confidences(run, page, tmp_path):
    data = gather(run)
    data["evaluation"]["drafts"][0]["calibration"] = {
        "temperatures": [0.8, 2.5], "error_before": [0.213, 0.104], "error_after": [0.05, 0.0],
    }  # fmt: skip
    page.show(render(data), tmp_path)
    assert page.run(TOUCHING) == []
    text = page.text("#confidence")
    assert "21.3 %" in text
    assert "temperature 2.50" in text
    page.open(run / "report.html")
    assert page.run("document.querySelector('#confidence')") is None


def test_a_directory_that_is_not_a_run_is_refused(tmp_path):
    for arguments, complaint in (
        ([tmp_path / "nowhere"], "no such run"),
        ([tmp_path], "no metrics.jsonl"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert isinstance(result.exception, BadInput)
        assert complaint in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_gathered_figures(run, tmp_path):
    data = gather(run)
    assert data["target"].endswith("target")
    assert data["machine"]["cpu_cores"] >= 1
    held_out = data["held_out"]
    assert held_out["step"][0] == 0
    assert held_out["length"][held_out["best"]] == max(held_out["length"][1:])
    assert len(held_out["joint"]) == 3
    # long runs are thinned but keep both ends
    lines = [{"step": i + 1, "loss": 1.0, "prefix_acceptance": [0.5]} for i in range(5000)]
    lines += [
        {"step": s, "evaluation": {"acceptance_length": 1.0 + s, "joint": [s]}} for s in (0, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    long = gather(tmp_path)
    steps = long["training"]["step"]
    assert (len(steps), steps[0], steps[-1]) == (MOST_POINTS, 1, 5000)
    assert steps == sorted(set(steps))
    evaluated = {"step": [0, 1], "length": [1.0, 2.0], "joint": [[0, 1]], "best": 1}
    assert long["held_out"] == evaluated
    assert long["evaluation"] is long["machine"] is None


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("eval.json", '{"drafts": [1]}', "'drafts[0]' is 1"),
        ("eval.json", '{"drafts": [], "target": "x"}', "'target' is 'x'"),
        ("machine.json", "[]", "expected an object"),
    ],
)
def test_damaged_files_are_a_one_line_error(tmp_path, name, content, told):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert gather(tmp_path)["training"]["step"] == [1]  # a diverged run also gets a page
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput) as caught:
        gather(tmp_path)
    assert told in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "eval.json").write_text('{"drafts": [{"name": "\\ud800"}]}')
    assert '"name": "?"' in render(gather(tmp_path)).encode().decode()


def test_lines_of_different_depths_leave_gaps(tmp_path):
    lines = [{"step": 1, "loss": 1.0, "prefix_acceptance": [0.5, 0.2]}, {"step": 2, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gather(tmp_path)["training"]["joint"] == [[0.5, None], [0.2, None]]


def test_the_forecast_panel(run, page, tmp_path):
    """An unfinished run has a panel with the forecast's numbers; a run that cannot be forecast has
    no such panel."""
    assert gather(run)["forecast"] is None  # the tiny draft hardly learns
    place = tmp_path / "half"
    place.mkdir()
    recipe_for("target", "chats.jsonl", place, "training.steps=1000").write_resolved(place)
    curve = upto(real_curve("h200_smollm2_eagle1"), 0.4)
    lines = [{"step": 5 * i + 5, "loss": 1.0, "tau": 2.0, "seconds": 1.0 * i} for i in range(60)]
    joint = [0.5, 0.3, 0.2, 0.1, 0.1, 0.05, 0.02]
    for i, (_, length, rounds) in enumerate(curve.measured):
        evaluation = {
            "acceptance_length": length,
            "rounds": rounds,
            "joint": joint,
            "conditional": joint,
        }
        lines.append({"step": 75 * i + 75, "evaluation": evaluation})
    lines.sort(key=lambda line: line["step"])
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = gather(place)
    page.show(render(data), place)
    text = page.text("#forecast")
    forecast = data["forecast"]
    for case in (forecast["end"], forecast["twice_data"], forecast["twice_time"]):
        assert f"{case['length']:.2f} ({case['low']:.2f} to {case['high']:.2f})" in text
    assert forecast["limits"]
    assert all(limit["says"] in text for limit in forecast["limits"])
    assert page.run("document.querySelectorAll('#forecast path.curve').length") == 4
