"""A race: equal tokens for all, one capture of the target, one verdict."""

import json

import pytest
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.race import ENTRANTS, Lap, RaceOptions, results, verdict


def test_all_entrants_see_the_same_and_the_target_answers_once(recipe, tmp_path, monkeypatch):
    base, path = recipe("data.valid_rows=6"), tmp_path / "recipe.yaml"
    path.write_text(base.to_yaml())
    asked, answer = [], HFEagle3TargetModel.answer
    monkeypatch.setattr(
        HFEagle3TargetModel, "answer", lambda self, rows: asked.append(rows) or answer(self, rows)
    )
    words = ["race", path, "--methods", "eagle3,peagle", "--seeds", "2", "--tokens", "1500"]
    words += ["--draft-tokens", "2", "--out", tmp_path / "out", "--json"]
    run = CliRunner().invoke(app, [*map(str, words)])
    assert run.exit_code == 0, run.output
    figures = json.loads(run.stdout)
    laps = figures["laps"]
    assert [(lap["method"], lap["seed"]) for lap in laps] == [
        ("eagle3", 0), ("peagle", 0), ("eagle3", 1), ("peagle", 1),
    ]  # fmt: skip
    assert len({lap["steps"] for lap in laps}) == 1
    assert all(lap["length"] >= 1 and lap["half"] >= 1 for lap in laps)
    documents = [tuple(row) for rows in asked for row in rows.input_ids.tolist()]
    assert len(documents) == len({*documents})  # in one capture; laps only remember
    assert figures["verdict"].startswith("on this data take ")
    assert (tmp_path / "out" / "race.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "out" / "race.json").read_text()) == figures


def laps_of(lengths, *, half=1.0, break_even=None):
    return [
        Lap(name, seed, 10, 1.0, half, length, 1.0, None if seed else break_even)
        for name, values in lengths.items()
        for seed, length in enumerate(values)
    ]


def test_the_verdict_is_honest_about_noise():
    clear = {"dspark": [2.0, 2.01, 2.02], "dflash": [1.5, 1.51, 1.49]}
    assert verdict(results(laps_of(clear))) == "on this data take dspark"
    noisy = {"dspark": [2.0, 1.7, 2.3], "domino": [1.9, 2.2, 1.6]}
    assert verdict(results(laps_of(noisy))) == "on this data take dspark; domino: within noise"
    assert "one seed says nothing" in verdict(results(laps_of({"dspark": [2.0], "domino": [1.0]})))
    growing = laps_of({"dspark": [2.0, 2.0]}, half=1.99) + laps_of({"dflash2": [1.9, 1.9]})
    assert "dflash2: catching up" in verdict(results(growing))


def test_a_costly_draft_loses_to_a_cheap_one_that_accepts_less():
    laps = laps_of({"eagle3": [2.0, 2.0]}, break_even=2.0)
    laps += laps_of({"peagle": [1.8, 1.8]}, break_even=1.2)
    assert [result.method for result in results(laps)] == ["peagle", "eagle3"]


def test_unknown_entrants_are_refused():
    assert RaceOptions(("all",)).entrants() == tuple(ENTRANTS)
    with pytest.raises(BadInput, match="no method 'dominos' to race; did you mean 'domino'"):
        RaceOptions(("dominos",)).entrants()
