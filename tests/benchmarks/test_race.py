"""The race of recipes over equal training time, on a tiny target."""

import json

import pytest
from test_second_target import RECIPE, here

import race


@pytest.mark.slow
def test_a_race_runs_everything_once(tiny_target, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RACE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(race, "fledge", lambda *words: json.loads(here([*words, "--json"])))
    trained = []

    def train(recipe, runs, words):
        for seed, run in enumerate(runs):
            trained.append(run.name)
            here(["train", recipe, f"run.output_dir={run}", f"training.seed={seed}", *words])

    monkeypatch.setattr(race, "train", train)
    answer = {"role": "assistant", "content": "me, and you"}
    asked = [{"role": "user", "content": f"who is number {i}?"} for i in range(24)]
    rows = {
        "chats": [{"messages": [question, answer]} for question in asked],
        "eval_some": [{"prompt": f"and then {i}?"} for i in range(3)],
        "others": [{"prompt": f"why {i}?"} for i in range(2)],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    recipes = [tmp_path / "slow.yaml", tmp_path / "fast.yaml"]
    for recipe, rate in zip(recipes, ("1e-4", "1e-2"), strict=True):
        text = RECIPE.replace("nobody", str(tiny_target)).replace("1e-2", rate)
        recipe.write_text(text)
    out = tmp_path / "race.json"
    words = ["--data", str(tmp_path / "chats.jsonl"), "--out", str(out), "--seeds", "2"]
    words += ["--seconds", "0.5", "--probe", "20", "--max-new-tokens", "12", "--live", "2"]
    words += ["--prompts", str(tmp_path / "eval_some.jsonl"), str(tmp_path / "others.jsonl")]

    race.main([str(recipes[0]), *words])
    first = json.loads(out.read_text())[str(recipes[0])]
    race.main([*map(str, recipes), *words])
    results = json.loads(out.read_text())
    assert trained == [
        f"{name}-{kind}{seed}"
        for name in ("slow", "fast")
        for kind in ("probe", "")
        for seed in (0, 1)
    ]
    assert results[str(recipes[0])]["length"] == first["length"]
    for entrant in results.values():
        assert entrant["steps"] > 0
        assert sorted(entrant["length"]) == ["others", "some"]
        assert all(len(seeds) == 2 for seeds in entrant["length"].values())
        assert entrant["live"]["proof"]["texts"] == 2
    table = capsys.readouterr().out.splitlines()[-4:]
    assert "| some | others | live speed-up |" in table[0]
    assert [line.split("|")[1].strip() for line in table[2:]] == list(map(str, recipes))
