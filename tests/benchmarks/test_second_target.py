"""The script that takes a target from its files to speed-ups, on a tiny target."""

import contextlib
import io
import json
from pathlib import Path

import pytest

import race
import second_target
from fledge.cli.main import run

ROOT = Path(__file__).parents[2]

RECIPE = """
target: {model: nobody, aux_layer_ids: [0, 1, 2]}
data: {valid_rows: 4, max_length: 96, workers: 1}
packing: {tokens: 96}
draft: {draft_vocab_size: 128}
objective: {ttt_steps: 3}
training: {lr: 1e-2, device: cpu}
"""


def here(words):
    """Run `fledge` in this process; returns what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as exit_info:
        run(words)
    assert exit_info.value.code == 0, printed.getvalue()
    return printed.getvalue()


@pytest.fixture
def command(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(race, "fledge", lambda *words: json.loads(here([*words, "--json"])))

    def train(recipe, runs, words):
        for run_ in runs:
            here(["train", recipe, f"run.output_dir={run_}", *words])

    monkeypatch.setattr(race, "train", train)
    kinds = ["dolly"] * 7 + ["mbpp"] * 10 + ["gsm8k_train"] * 6
    chats = [
        {
            "id": f"{kind}/{i}",
            "messages": [
                {"role": "user", "content": f"{kind} {i}?"},
                {"role": "assistant", "content": "what another model said"},
            ],
        }
        for i, kind in enumerate(kinds)
    ]
    prompts = [{"prompt": f"and then {i}?"} for i in range(3)]
    for name, rows in {"chats": chats, "eval_asked": prompts}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return [
        "--target", str(tiny_target), "--chats", str(tmp_path / "chats.jsonl"),
        "--prompts", str(tmp_path / "eval_asked.jsonl"), "--out", str(tmp_path / "out"),
        "--recipes", str(tmp_path / "recipe.yaml"), "--batch", "2", "--max-new-tokens", "12",
        "--train-s", "1", "--probe", "20", "--eval-tokens", "12", "--batches", "1", "3",
        "--live-prompts", "3", "--device", "cpu",
    ]  # fmt: skip


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def kinds(path):
    return [row["id"].partition("/")[0] for row in rows(path)]


@pytest.mark.slow
def test_the_script_gets_from_a_target_to_a_table_and_repeats_nothing(command, tmp_path, capsys):
    out = tmp_path / "out"
    second_target.main(command)
    held_out = {row["id"] for row in rows(out / "eval_code.jsonl")}
    assert held_out == {"mbpp/7", "mbpp/12"}
    answered = rows(out / "answers.jsonl")
    assert len({row["id"] for row in answered}) == 21
    assert not held_out & {row["id"] for row in answered}
    assert all("another model" not in row["messages"][1]["content"] for row in answered)
    assert set(kinds(out / "answers.jsonl")[:14]) == {"mbpp", "gsm8k_train"}
    [draft] = json.loads((out / "stage-replay.json").read_text())["drafts"]
    assert draft["live"]["agrees"]
    assert set(draft["by_set"]) == {"eval_asked", "eval_code"}
    [live] = (json.loads(path.read_text()) for path in out.glob("stage-live-*.json"))
    assert {batch: set(by_prompts) for batch, by_prompts in live.items()} == {
        "1": {"asked", "code"}, "3": {"asked", "code"},
    }  # fmt: skip
    for figures in (figures for by_prompts in live.values() for figures in by_prompts.values()):
        assert figures["same_texts"] == figures["texts"] > 0  # float32: ties break the same way
        assert 1 <= figures["acceptance_length"] <= 4
        assert figures["disturbed"] == (figures["speedup"] is None)
    assert "| float32 | 3 | code |" in (out / "result.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in out.glob("stage-*")}
    second_target.main(command)
    assert {path: path.stat().st_mtime_ns for path in out.glob("stage-*")} == before


def test_an_impossible_speedup_is_not_reported():
    """Two texts of 20 tokens: 20 plain passes, 10 with a draft."""
    plain = second_target.Spent([40], [2.0], [20])
    good = second_target.gained(plain, second_target.Spent([40], [1.25], [10]))
    assert (good["speedup"], good["median_speedup"]) == (pytest.approx(1.6), pytest.approx(1.6))
    assert (good["most_possible"], good["disturbed"]) == (2.0, False)
    odd = second_target.gained(plain, second_target.Spent([40], [0.9], [10]))
    assert (odd["disturbed"], odd["speedup"], odd["median_speedup"]) == (True, None, None)
    assert second_target._gain(odd["speedup"]) == "clock disturbed"


def test_answering_stops_in_time_and_resumes_later(command, tmp_path, capsys):
    out = tmp_path / "out"
    short = [*command, "--stages", "prompts", "regenerate", "--regenerate-s", "0"]
    second_target.main(short)
    assert len(rows(out / "answers.jsonl")) == 8  # a chunk of four batches
    first = (out / "answers.jsonl").read_text()
    (out / "stage-regenerate.json").unlink()
    second_target.main([*short[:-1], "100"])
    assert (out / "answers.jsonl").read_text().startswith(first)
    assert len(rows(out / "answers.jsonl")) == 21
