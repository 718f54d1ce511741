"""`fledge plan` and `fledge train` as a user runs them."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from fledge.cli.eval import positions
from fledge.cli.train import acceptance_table, run_recipe
from fledge.core.terminal import Terminal
from fledge.methods.registry import METHODS
from train.tiny import make_chats, make_target, recipe_for


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli_train")
    target, chats = make_target(root / "target"), make_chats(root / "chats.jsonl")
    recipe = recipe_for(target, chats, root / "run")
    (root / "recipe.yaml").write_text(recipe.to_yaml())
    return root


@pytest.mark.slow
def test_plan_train_and_train_again(fledge, place):
    recipe, run = place / "recipe.yaml", place / "run"
    plan = json.loads(fledge("plan", recipe, "--json").out)
    assert plan["peak_bytes"] > plan["target_bytes"] > 0
    assert not run.exists()  # a plan leaves nothing behind
    outcome = json.loads(fledge("train", recipe, "--json").out)
    assert outcome["finished"]
    assert outcome["before"]["step"] == 0
    assert outcome["measured"]["disk_bytes"] > 0
    assert (run / "best" / "model.safetensors").exists()
    again = json.loads(fledge("train", recipe, "--json").out)  # finished: nothing left to do
    assert again["already_finished"]
    assert again["step"] == outcome["step"]
    assert again["after"] == outcome["after"]


def test_without_a_terminal_every_logged_step_prints_a_line(place, tmp_path, capsys):
    recipe = recipe_for(place / "target", place / "chats.jsonl", tmp_path / "run")
    assert run_recipe(recipe) == 0
    line = re.compile(
        r"training (\d+)/(\d+) steps \(\d+%\), loss \d+\.\d+ length \d\.\d+ [\d,]+ tok/s "
        r"target \d+%; \d:\d\d elapsed(, about \d:\d\d left)?"
    )
    matches = [m for text in capsys.readouterr().err.splitlines() if (m := line.match(text))]
    steps, [total] = [int(match[1]) for match in matches], {int(match[2]) for match in matches}
    assert steps == sorted({total, *range(2, total, 2)})  # tracking.every_steps, and the last
    assert all(match[3] for match in matches[:-1])


def test_the_table_title_names_the_drafting_method():
    figures = {"acceptance_length": 1.5, "joint": [0.4, 0.1]}
    titles = {
        name: acceptance_table(
            figures, figures, method.strategies[method.own_strategy].drafted
        ).title
        for name, method in METHODS.items()
    }
    assert titles["eagle3"].endswith("greedy chain")
    assert "tokens in parallel" in titles["peagle"]


def test_tables_of_eight_tokens_fit_in_80_columns():
    """P-EAGLE drafts eight: no heading and no figure is cut."""
    rates = [0.812, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1, 1.0]
    figures = {"acceptance_length": 2.345, "joint": rates}
    acceptance = SimpleNamespace(length=2.345, joint=rates, conditional=rates)
    report = SimpleNamespace(name="runs/a_long_name/best", method="parallel", acceptance=acceptance)
    drafted = METHODS["peagle"].strategies["parallel"].drafted
    for table in (acceptance_table(figures, figures, drafted), positions([report])):
        terminal = Terminal(width=80, file=io.StringIO())
        terminal.print(table)
        lines = terminal.file.getvalue().splitlines()
        [heading] = [line for line in lines if "length" in line and "token 1" in line]
        assert heading.split()[-10:] == ["length", "token", *"12345678"]
        shown = [line.split()[-8:] for line in lines if "81.2%" in line]
        assert shown == [[f"{rate:.1%}" for rate in rates]] * 2


@pytest.mark.parametrize("width", [60, 100])
def test_sentences_around_a_table_are_as_wide_as_the_terminal(width):
    """A caption as narrow as its table breaks into many short lines."""
    acceptance = SimpleNamespace(length=1.5, joint=[0.4], conditional=[0.4])
    report = SimpleNamespace(name="best", method="chain", acceptance=acceptance)
    figures = {"acceptance_length": 1.5, "joint": [0.4]}
    for table in (acceptance_table(figures, figures, "chain"), positions([report])):
        terminal = Terminal(width=width, file=io.StringIO())
        terminal.print(table)
        lines = [line.strip() for line in terminal.file.getvalue().splitlines()]
        caption = lines[[line.startswith("length:") for line in lines].index(True) :]
        assert len(caption) <= sum(
            -(-len(text) // (width - 12)) for text in table.caption.split("\n")
        )
        assert all(len(line) <= width for line in lines)


@pytest.mark.slow
def test_a_signal_leaves_a_resumable_run(place):
    command = [sys.executable, "-m", "fledge", "train", place / "recipe.yaml"]
    command += [f"run.output_dir={place / 'cut'}", "training.epochs=400"]
    process = subprocess.Popen(
        [*command, "checkpoint.every_steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = place / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:  # until it is really training
        if metrics.exists() and '"loss"' in metrics.read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command continues the run" in out
    newest = max((place / "cut" / "checkpoints").glob("step-*"))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert json.loads((newest / "state.json").read_text())["step"] >= lines[-1]["step"]


@pytest.mark.skipif(bool(find_spec("wandb")), reason="wandb is installed here")
def test_a_missing_tracker_error_says_what_to_install(fledge, place, tmp_path):
    overrides = [f"run.output_dir={tmp_path / 'run'}", "tracking.trackers=wandb"]
    ended = fledge("train", place / "recipe.yaml", *overrides)
    assert (ended.code, "[track]" in ended.err) == (2, True)
