"""The report in a real browser: it opens from disk, asks nobody, and says what the files say."""

import json
import re

import pytest
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.report.gather import MOST_POINTS, gather
from fledge.report.page import render
from report.test_report_looks import TOUCHING
from train.curve_files import real_curve
from train.tiny import recipe_for


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_from_disk_without_an_error_or_a_request(run, page, scheme):
    page.requests.clear()
    page.open(run / "report.html", scheme)
    assert page.complaints == []
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


def test_it_says_what_the_files_say(run, page):
    found = json.loads((run / "eval.json").read_text())["drafts"][0]
    page.open(run / "report.html")
    cards = page.run("[...document.querySelectorAll('.card')].map((c) => c.innerText)")
    assert f"{found['acceptance_length']:.2f}" in cards[0]
    data = gather(run)
    assert data["method"] == "EAGLE-3"  # its title, not the recipe's word for it
    held = data["held_out"]
    assert any(f"{held['length'][held['best']]:.2f}" in card for card in cards)
    bars = page.run("[...document.querySelectorAll('.bars')].map((b) => b.innerText).join('|')")
    for name, part in found["by_category"].items():
        assert name in bars
        assert f"{part['acceptance_length']:.2f}" in bars
    for one in found["where_it_fails"]["causes"].values():
        assert f"{one['rejected']:,} of {one['judged']:,} rejected" in bars
    text = page.run("document.querySelector('main').innerText")
    assert found["where_it_fails"]["remedy"][1:] in text
    assert found["definition"][1:] in text
    assert len(found["joint"]) == 3  # as many as the run trained
    assert "ttt_steps" in text
    assert found["samples"][0]["prompt"] in text


def test_every_token_is_shown_in_its_writers_colour(run, page, tmp_path):
    data = gather(run)
    samples = data["evaluation"]["drafts"][0]["samples"]
    for index, token in enumerate(samples[1]["tokens"]):  # a better draft than the tiny one
        token[1] = index % 10
    (tmp_path / "page.html").write_text(render(data))
    page.open(tmp_path / "page.html")
    for index, sample in enumerate(samples):
        page.run(f"document.querySelectorAll('.tabs button')[{index}].click()")
        shown = page.run(
            "[...document.querySelectorAll('.said > .t')].map((t) => [t.textContent,"
            " +t.dataset.depth, +t.dataset.round, getComputedStyle(t).backgroundColor])"
        )
        clear = "rgba(0, 0, 0, 0)"
        assert [row[0].replace("⏎", "") for row in shown] == [t[0] for t in sample["tokens"]]
        assert [row[1:3] for row in shown] == [t[1:3] for t in sample["tokens"]]
        assert all((colour != clear) == (depth > 0) for _, depth, _, colour in shown)
        if index == 1:
            colours = {min(depth, 8): colour for _, depth, _, colour in shown}
            assert len(set(colours.values())) == 9  # eight depths and none


def test_pointing_at_a_token_shows_both_probabilities(run, page):
    page.open(run / "report.html")
    page.point_at(".said > .t.own:not(.first)")
    tip = page.run("document.getElementById('tip').innerText")
    assert page.run("document.getElementById('tip').hidden") is False
    assert "the target's own" in tip
    assert "target's probability" in tip
    page.point_at("svg.chart .hover")
    assert "step" in page.run("document.getElementById('tip').innerText")
    page.run("document.querySelectorAll('.switch button')[1].click()")
    assert page.run("document.querySelector('.switch button:last-child').ariaPressed") == "true"
    assert page.complaints == []


def test_it_fits_a_telephone(run, page):
    page.open(run / "report.html", width=390, height=800)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_texts_cannot_break_out(run, page, tmp_path):
    """Whatever a model says stays text, in the data, the title and the tokens."""
    evil = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>{{style}}"
    data = gather(run)
    data["name"] = evil
    data["evaluation"]["drafts"][0]["samples"][0]["tokens"][0][0] = evil
    data["training"]["loss"][1] = float("nan")
    (tmp_path / "evil.html").write_text(render(data))
    page.complaints.clear()
    page.open(tmp_path / "evil.html")
    assert page.complaints == []
    assert page.run("document.title") == f"{evil} · fledge report"
    assert page.run("document.querySelector('h1').textContent") == evil
    assert page.run("document.querySelector('.said .t').textContent") == evil
    assert page.run("document.querySelectorAll('img').length") == 0


def test_a_run_that_was_not_measured(run, page, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b'{"step": 9')
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "x.html")])
    assert result.exit_code == 0, result.output
    page.complaints.clear()
    page.open(tmp_path / "x.html")
    assert page.complaints == []
    text = page.run("document.querySelector('main').innerText")
    assert "fledge report RUN --measure" in text
    assert "Held-out acceptance over time" in text


def test_a_disturbed_clock_shows_no_speed_up(run, page, tmp_path):
    figures = json.loads((run / "eval.json").read_text())
    speed = figures["drafts"][0]["speed"]
    lost = [name for name in speed if "speedup" in name or "break_even" in name or "_per_s" in name]
    speed |= {"disturbed": True, **dict.fromkeys(lost)}
    (tmp_path / "eval.json").write_text(json.dumps(figures))
    words = ["--eval", str(tmp_path / "eval.json"), "--out", str(tmp_path / "x.html")]
    result = CliRunner().invoke(app, ["report", str(run), *words])
    assert result.exit_code == 0, result.output
    page.complaints.clear()
    page.open(tmp_path / "x.html")
    assert page.complaints == []
    text = page.run("document.querySelector('main').innerText")
    assert "The clock was disturbed" in text
    assert "measured speed-up" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_draft_that_says_how_sure_it_is(run, page, tmp_path, scheme):
    """Every interval is a point where its two shares are; the diagonal runs through where they
    agree, and the bars say how far off the draft was before and after."""
    data = gather(run)
    draft = data["evaluation"]["drafts"][0]
    table = [[[0.05, 0.1, 40], [0.45, 0.5, 30], [0.95, 0.9, 1200]], [[0.25, 0.25, 9]]]
    draft["calibration"] = {
        "temperatures": [0.8, 2.5], "error_before": [0.213, 0.104], "error_after": [0.05, 0.0],
        "before": table, "after": table,
    }  # fmt: skip
    (tmp_path / "page.html").write_text(render(data))
    page.open(tmp_path / "page.html", scheme)
    assert page.complaints == []
    at = page.run(
        "(() => { const chart = document.querySelector('.agreement');"
        "const box = (n) => ['cx', 'cy'].map((a) => Number(n.getAttribute(a)));"
        "const line = chart.querySelector('.diagonal'), end = (n) => Number(line.getAttribute(n));"
        "return { points: [...chart.querySelectorAll('.bin')].map(box),"
        " ends: ['x1', 'y1', 'x2', 'y2'].map(end) }; })()"
    )
    x1, y1, x2, y2 = at["ends"]
    shares = [[(x - x1) / (x2 - x1), (y - y1) / (y2 - y1)] for x, y in at["points"]]
    wanted = [point[:2] for points in table for point in points]
    assert [pytest.approx(point, abs=1e-6) for point in wanted] == shares
    assert page.run(TOUCHING) == []
    text = page.run("document.querySelector('#confidence').innerText")
    assert "21.3 %" in text
    assert "temperature 2.50" in text
    page.open(run / "report.html", scheme)
    assert page.run("document.querySelector('#confidence')") is None


def test_what_is_no_run(tmp_path):
    for arguments, complaint in (
        ([tmp_path / "nowhere"], "no such run"),
        ([tmp_path], "no metrics.jsonl"),
        ([tmp_path, "--measure"], "no metrics.jsonl"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert isinstance(result.exception, BadInput)
        assert complaint in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_gathering(run, tmp_path):
    data = gather(run)
    assert data["target"].endswith("target")
    assert data["machine"]["cpu_cores"] >= 1
    held = data["held_out"]
    assert held["replayed"]
    assert held["step"][0] == 0
    assert held["length"][held["best"]] == max(held["length"][1:])
    assert len(held["joint"]) == 3
    # long runs are thinned, ends included; runs from before replay show what they have
    lines = [{"step": i + 1, "loss": 1.0, "prefix_acceptance": [0.5]} for i in range(5000)]
    lines += [{"step": s, "evaluation": {"tau": 1.0 + s, "prefix_acceptance": [s]}} for s in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    old = gather(tmp_path)
    steps = old["training"]["step"]
    assert (len(steps), steps[0], steps[-1]) == (MOST_POINTS, 1, 5000)
    assert steps == sorted(set(steps))
    assert old["held_out"] == {
        "replayed": False, "step": [0, 1], "length": [1.0, 2.0], "joint": [[0, 1]], "best": 1,
    }  # fmt: skip
    assert old["evaluation"] is old["machine"] is None


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("metrics.jsonl", '{"step": "x", "loss": 1.0}', "line 1: the line is damaged: 'step'"),
        ("metrics.jsonl", '{"step": 1, "evaluation": [2]}', "'evaluation' is [2]"),
        ("metrics.jsonl", '{"step": 1, "evaluation": {"joint": [{}]}}', "evaluation.joint[0]"),
        ("eval.json", '{"drafts": [1]}', "'drafts[0]' is 1"),
        ("eval.json", '{"drafts": [], "target": "x"}', "'target' is 'x'"),
        ("eval.json", "[" * 9999, "nested too deeply"),
        ("machine.json", "[]", "expected an object"),
        ("recipe.yaml", "objective: [1]", "'objective' is [1]"),
        ("recipe.yaml", "a: &a [*a]", "an alias"),
    ],
)
def test_files_of_other_types_are_one_line(tmp_path, name, content, told):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert gather(tmp_path)["training"]["step"] == [1]  # a diverged run has a page too
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput) as caught:
        gather(tmp_path)
    assert told in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_half_a_surrogate_pair_is_shown_as_something_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "eval.json").write_text('{"drafts": [{"name": "\\ud800"}]}')
    assert '"name": "?"' in render(gather(tmp_path)).encode().decode()


def test_lines_of_different_depths_leave_gaps(tmp_path):
    lines = [{"step": 1, "loss": 1.0, "prefix_acceptance": [0.5, 0.2]}, {"step": 2, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gather(tmp_path)["training"]["joint"] == [[0.5, None], [0.2, None]]


def test_what_is_to_come(run, page, tmp_path):
    """A run in its middle has a panel with the forecast's numbers; one of which nothing can be said
    has none."""
    assert gather(run)["forecast"] is None  # the tiny draft hardly learns
    place = tmp_path / "half"
    place.mkdir()
    recipe_for("target", "chats.jsonl", place, "training.steps=1000").write_resolved(place)
    curve = real_curve("h200_smollm2_eagle1").upto(0.4)
    lines = [
        {"step": 5 * i + 5, "loss": 1.0, "tau": tau, "seconds": 1.0 * i}
        for i, (_, tau) in enumerate(curve.windows[:60])
    ]
    joint = [0.5, 0.3, 0.2, 0.1, 0.1, 0.05, 0.02]
    for i, (_, length, rounds) in enumerate(curve.measured):
        found = {
            "acceptance_length": length,
            "rounds": rounds,
            "joint": joint,
            "conditional": joint,
        }
        lines.append({"step": 75 * i + 75, "evaluation": found})
    lines.sort(key=lambda line: line["step"])
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = gather(place)
    (place / "x.html").write_text(render(data))
    page.complaints.clear()
    page.open(place / "x.html")
    assert page.complaints == []
    text = page.run("document.getElementById('forecast').innerText")
    ahead = data["forecast"]
    for one in (ahead["end"], ahead["twice_data"], ahead["twice_time"]):
        assert f"{one['length']:.2f} ({one['low']:.2f} to {one['high']:.2f})" in text
    assert ahead["limits"]
    assert all(limit["says"] in text for limit in ahead["limits"])
    assert page.run("document.querySelectorAll('#forecast path.curve').length") == 4
