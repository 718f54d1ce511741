"""fledge from Python: functions that do what the commands do, and print nothing."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fledge
from fledge.cli.main import app
from fledge.core.reading import load_tensors
from fledge.recipe.schema import as_recipe, load_recipe, shipped_recipes
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes, make_chats, make_target, recipe_for

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("api")
    make_target(root / "target")
    make_chats(root / "chats.jsonl")
    rows = [{"prompt": f"count to {n}"} for n in range(3)]
    (root / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(root / "cache"))
        yield root


def recipe_in(place, name, *overrides):
    return recipe_for(place / "target", place / "chats.jsonl", place / name, *overrides)


def weights(draft):
    return load_tensors(draft / "model.safetensors")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def trained(place):
    return fledge.train(recipe_in(place, "run"))


# --- functions of the package --------------------------------------------------------------------


def test_functions_are_found_without_heavy_imports():
    code = """
import sys, inspect, fledge
assert list(inspect.signature(fledge.train).parameters) == ["recipe", "observer", "sections"]
assert "engine" in inspect.signature(fledge.export).parameters
assert not {"torch", "pydantic", "transformers"} & set(sys.modules)
try:
    fledge.train("no_such_recipe")
except fledge.BadInput as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "no_such_recipe: no such recipe" in result.stdout


# --- train --------------------------------------------------------------------------------------


def test_train_equals_the_command_and_prints_nothing(place, trained, capfd):
    fit(set_up(recipe_in(place, "by_hand")), Notes())
    capfd.readouterr()
    assert same(weights(trained.best), weights(place / "by_hand" / "best"))
    assert trained.directory == place / "run"
    assert trained.finished
    assert not trained.already_finished
    assert trained.acceptance_length == max(
        json.loads(line)["evaluation"]["acceptance_length"]
        for line in (place / "run" / "metrics.jsonl").read_text().splitlines()
        if '"evaluation"' in line and '"step": 0' not in line
    )
    assert trained.before["step"] == 0
    assert trained.after["step"] == trained.step
    with pytest.raises(dataclasses.FrozenInstanceError):
        trained.step = 0
    again = fledge.train(recipe_in(place, "run"))
    assert (again.already_finished, again.step, again.best) == (True, trained.step, trained.best)
    notes = Notes()
    fledge.train(recipe_in(place, "noted"), observer=notes, training={"epochs": 1})
    assert notes.lines
    assert notes.evaluations
    assert capfd.readouterr() == ("", "")


def test_without_held_out_rows_best_is_the_newest_checkpoint(place):
    sections = {"data": {"valid_rows": 0}, "training": {"steps": 2}}
    done = fledge.train(recipe_in(place, "all"), **sections)
    assert done.acceptance_length is None
    assert (done.best / "model.safetensors").is_file()


class Interrupts(Notes):
    """Presses Ctrl-C at a step."""

    def logged(self, values):
        if values["step"] == 4:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_can_be_continued(place, trained):
    with pytest.raises(KeyboardInterrupt):
        fledge.train(recipe_in(place, "interrupted"), observer=Interrupts())
    checkpoints = sorted((place / "interrupted" / "checkpoints").iterdir())
    assert 0 < int(checkpoints[-1].name.removeprefix("step-")) < trained.step
    done = fledge.train(recipe_in(place, "interrupted"))
    assert done.finished
    assert not done.already_finished
    assert same(weights(done.best), weights(trained.best))
    assert done.after == trained.after


def test_a_recipe_is_a_file_a_name_a_mapping_or_a_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("training: {lr: 1e-3, steps: 7}\nobjective: {kind: peagle}\n")
    base = load_recipe(file)
    sections = {"training": {"lr": 1e-3, "steps": 7}, "objective": {"kind": "peagle"}}
    assert as_recipe(file) == as_recipe(str(file)) == as_recipe(sections) == as_recipe(base) == base
    changed = load_recipe(file, ["training.lr=2e-3", "objective.kind=eagle3", f"data.train={file}"])
    changes = {"training": {"lr": 2e-3}, "objective": {"kind": "eagle3"}, "data": {"train": file}}
    for source in (file, sections):
        assert as_recipe(source, changes) == changed
    faster = as_recipe(base, {"training": {"lr": 2e-3}})
    assert faster == load_recipe(file, ["training.lr=2e-3"])
    assert as_recipe(None) == load_recipe(None)
    for name, path in shipped_recipes().items():
        assert as_recipe(name) == load_recipe(path)
    assert "smollm2_cpu" in shipped_recipes()


@pytest.mark.parametrize(
    ("source", "changes", "told"),
    [
        ({"trainig": {}}, {}, "recipe: unknown section 'trainig'; did you mean 'training'?"),
        (None, {"training": {"lrr": 1}}, "argument 'training': unknown key 'training.lrr'"),
        (None, {"training": 3}, "argument 'training': training: must be a mapping, got 3"),
        ({"training": {"lr": -1}}, {}, "recipe: training.lr"),
        ("smollm2_cpuu", {}, "did you mean 'smollm2_cpu'?"),
        ("nowhere.yaml", {}, "nowhere.yaml"),
    ],
)
def test_recipe_errors_are_one_line(source, changes, told):
    with pytest.raises(fledge.BadInput) as caught:
        fledge.train(source, **changes)
    assert told in str(caught.value)


# --- evaluate and export ------------------------------------------------------------------------


def test_evaluate_equals_the_command_and_prints_nothing(place, trained, capfd):
    options = ["--prompts", str(place / "asked.jsonl"), "--device", "cpu", "--live", "1", "--json"]
    result = CliRunner().invoke(app, ["eval", str(trained.best), *options])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    capfd.readouterr()
    with fledge.HFEagle3TargetModel.from_pretrained(
        str(place / "target"), aux_layer_ids=[0, 1, 2], dtype="float32", device="cpu"
    ) as loaded:
        rows = [json.loads(line) for line in (place / "asked.jsonl").read_text().splitlines()]
        for target, prompts in (("", place / "asked.jsonl"), (loaded, rows)):
            evaluation = fledge.evaluate(trained.best, target, prompts, live=1, device="cpu")
            [draft], [printed_draft] = evaluation.to_json()["drafts"], printed["drafts"]
            assert evaluation.agrees
            assert evaluation.acceptance_length == draft["acceptance_length"]
            for name in ("joint", "acceptance_length", "by_context", "definition"):
                assert draft[name] == printed_draft[name]
            assert evaluation.to_json()["target"] == printed["target"]
        assert loaded.info().vocab_size == 400  # still open
    assert evaluation.prompts == ("given",)
    assert capfd.readouterr() == ("", "")
    pair = fledge.evaluate([trained.best, trained.directory], prompts=rows[:1], live=0)
    assert [report.acceptance for report in pair.reports] == [pair.reports[0].acceptance] * 2
    assert pair.speedup is None
    with pytest.raises(fledge.BadInput, match="no such prompts 'Why\\?'"):
        fledge.evaluate(trained.best, prompts=["Why?"])
    with pytest.raises(fledge.BadInput, match="prompt 1: no messages in this row"):
        fledge.evaluate(trained.best, prompts=[{}])


def test_export_returns_its_directory_and_checks(trained, capfd):
    done = fledge.export(trained.directory, engine="vllm", device="cpu")
    assert done.directory == trained.directory / "exports" / "vllm"
    assert (done.directory / "model.safetensors").is_file()
    assert done.checks.tensors == len(weights(trained.best))
    assert dataclasses.asdict(done.checks) == done.record["self_check"]
    assert done.acceptance_length == done.checks.decoded.acceptance_length >= 1
    assert (done.engine, done.num_draft_tokens) == ("vllm", 3)
    bare = fledge.export(trained.best, engine="sglang", out=trained.directory.parent / "bare",
                         without_target=True)  # fmt: skip
    assert bare.acceptance_length is None
    assert capfd.readouterr() == ("", "")
    with pytest.raises(fledge.BadInput, match="no engine 'vlm'"):
        fledge.export(trained.best, engine="vlm")


# --- a custom training loop ---------------------------------------------------------------------


def test_the_documented_loop_trains_a_draft(place, monkeypatch, capsys):
    """docs/python.md, word for word, on the tiny target."""
    page = (ROOT / "docs" / "python.md").read_text()
    [loop] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "while" in code]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 36
    assert "from fledge" not in loop
    assert {*re.findall(r"fledge\.(\w+)", loop)} <= {*fledge.__all__}
    constants = f"MODEL, LAYERS, CHATS = {str(place / 'target')!r}, [0, 1, 2], 'chats.jsonl'"
    loop, count = re.subn("^MODEL.*$", constants, loop, flags=re.M)
    loop, more = re.subn("^STEPS.*$", "STEPS, TOKENS = 60, 96", loop, flags=re.M)
    assert count == more == 1
    monkeypatch.chdir(place)
    torch.manual_seed(0)
    namespace = {}
    exec(compile(loop, "docs/python.md", "exec"), namespace)
    losses = namespace["losses"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    options = ["--target", str(place / "target"), "--prompts", str(place / "asked.jsonl"), "--json"]
    result = CliRunner().invoke(app, ["eval", str(place / "my_draft"), *options, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    [figures] = json.loads(result.stdout)["drafts"]
    assert len(figures["joint"]) == 3  # the number of draft tokens comes from its config
    assert figures["live"]["agrees"]
