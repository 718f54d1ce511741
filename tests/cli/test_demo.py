"""The last part of the demo, on the tiny target: figures, a lossless check, a report."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from fledge.cli import demo
from fledge.cli.console import out
from fledge.core.files import write_json
from fledge.core.install import fledge_command
from fledge.demo import CHATS, RECIPE, ROWS
from fledge.recipe.schema import load_recipe
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes


def test_it_ends_with_acceptance_a_lossless_check_and_a_page(
    trained, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in (5, 12, 3)))
    assert demo.measure_and_show(trained, prompts)
    shown = " ".join(capsys.readouterr().out.split())
    assert "count to 5" in shown
    assert "rounds in which all tokens up to this one were accepted" in shown
    assert "The draft wrote what is between ⟦ and ⟧. On 3 questions it never saw:" in shown
    assert "green" not in shown  # this is no terminal: nothing is
    assert "lossless: 2 of 2 answers" in shown
    assert "report.html" in shown
    assert shown.index("report.html") < shown.index("without the draft ")
    assert "target passes" in shown
    assert (trained / "report.html").stat().st_size > 20_000
    evaluation = json.loads((trained / "eval.json").read_text())
    assert len(evaluation["drafts"][0]["samples"]) == 3


def test_it_ends_with_three_commands_that_exist(capsys):
    import typer.main

    from fledge.cli.main import app

    demo.what_next(Path("demo_out/run"))
    shown = capsys.readouterr().out
    assert "green" not in shown
    lines = [line.strip() for line in shown.splitlines() if "demo_out" in line]
    assert [line.partition(" demo_out/run")[0] for line in lines] == [
        fledge_command(verb) for verb in ("chat", "report", "export")
    ]
    for line in lines:
        words = shlex.split(line.removeprefix(f"{fledge_command()} "))
        typer.main.get_command(app).commands[words[0]].make_context(words[0], words[1:])


def test_json_is_alone_on_stdout(tmp_path, capsys, monkeypatch):
    def tell(directory, rows):
        out.print(f"the story of {rows} chats")
        write_json(directory / "run" / "eval.json", {"drafts": []})
        return True

    monkeypatch.setattr(demo, "tell", tell)  # trains for minutes; its end is tested above
    demo.demo(tmp_path, rows=7, as_json=True)
    shown = capsys.readouterr()
    expected = {"directory": str(tmp_path / "run"), "lossless": True, "evaluation": {"drafts": []}}
    assert json.loads(shown.out) == expected
    assert shown.err == "the story of 7 chats\n"
    demo.demo(tmp_path, rows=7, as_json=False)
    assert capsys.readouterr().out == "the story of 7 chats\n"


@pytest.mark.parametrize("fast", [False, True])
def test_it_trains_in_bfloat16_where_the_cpu_supports_it(fast, tmp_path, monkeypatch):
    capabilities = {"avx2": True, "avx512_bf16": fast, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    recipe = demo.recipe_for(tmp_path / "chats.jsonl", tmp_path / "run")
    expected = ("bfloat16", "bfloat16") if fast else ("float32", "float32")
    assert (recipe.target.dtype, recipe.training.compute_dtype) == expected
    assert recipe.run.output_dir == str(tmp_path / "run")
    recipe.write_resolved(tmp_path / "run")
    capabilities["avx512_bf16"] = not fast  # a different machine: the run continues as it started
    assert demo.recipe_for(tmp_path / "chats.jsonl", tmp_path / "run") == recipe


@pytest.mark.parametrize("fast", [False, True])
def test_the_lossless_check_is_in_float32_and_the_speed_in_what_the_cpu_multiplies(
    fast, recipe, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast})
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    overrides = ("target.dtype=bfloat16", "training.compute_dtype=bfloat16", "training.steps=2")
    fit(set_up(recipe(*overrides)), Notes())
    prompts, dtypes = tmp_path / "asked.jsonl", []
    prompts.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in (5, 12)))
    monkeypatch.setattr(
        demo, "_show_side_by_side", lambda run, target, turn: dtypes.append(target.info().dtype)
    )
    assert demo.measure_and_show(tmp_path / "run", prompts)
    assert dtypes == [torch.bfloat16 if fast else torch.float32]
    evaluation = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert evaluation["target"]["dtype"] == "float32"
    assert ("in bfloat16, which this CPU" in " ".join(capsys.readouterr().out.split())) is fast


def test_questions_are_unseen_and_of_every_kind():
    lines = CHATS.read_text().splitlines(keepends=True)
    rows = list(demo._questions(lines[ROWS:]))
    kinds = [row["category"] for row in rows]
    assert kinds == ["stories"] * 4 + ["tips"] * 2 + ["explanations"] * 2
    trained = {json.loads(line)["messages"][0]["content"] for line in lines[:ROWS]}
    assert not trained & {row["messages"][0]["content"] for row in rows}
    assert load_recipe(RECIPE, ["data.train=x"]).objective.ttt_steps == demo._DRAFT_TOKENS
