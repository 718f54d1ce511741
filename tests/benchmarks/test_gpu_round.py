"""The prepared GPU round: its plan fits, its calls run with toy shapes, its tables are renewed."""

import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import gpu_round
import gpu_tables

ROOT = Path(__file__).parents[2]


def test_the_plan_fits_the_time_that_is_lent():
    lines = list(gpu_round.plan())
    minutes = float(re.match(r"[\d.]+", lines[-2])[0])
    assert minutes * 60 <= gpu_round.LENT_S
    for call in gpu_round.CALLS:  # no call outlasts the machine's limit, even if its steps do
        assert sum(step.limit_s for step in call.steps) <= 540, call.name
    loads = [load for call in gpu_round.CALLS for load in call.load]
    for model, pieces in gpu_round.MODELS.items():
        assert sum(load.startswith(f"{model}.") for load in loads) == pieces


def place(tmp_path, target):
    return gpu_round.Place(tmp_path / "state", tmp_path / "out", toy=True, target=str(target))


def load(folder: Path) -> None:
    """What the first call brings, in small."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    answer = {"role": "assistant", "content": "me, and you"}
    kinds = ["gsm8k_train", "mbpp", "dolly"]
    rows = [
        {
            "id": f"{kinds[i % 3]}/{i}",
            "messages": [{"role": "user", "content": f"who? {i}"}, answer],
        }
        for i in range(30)
    ]
    asked = [{"prompt": f"and then {i}?"} for i in range(3)]
    files = {"smollm2_chat.jsonl": rows, **dict.fromkeys(gpu_round.SETS, asked)}
    with tarfile.open(folder / "data.tar.xz", "w:xz") as archive:
        for name, lines in files.items():
            path = folder / name
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            archive.add(path, f"data/{name}")
            path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_call_of_the_round_runs_with_toy_shapes(tiny_target, tmp_path, monkeypatch):
    deep = tmp_path / "deep"  # enough layers for the recipes' defaults
    shutil.copytree(tiny_target, deep)
    config = LlamaConfig.from_pretrained(deep, num_hidden_layers=12)
    LlamaForCausalLM(config).save_pretrained(deep)
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(gpu_round, "LOADS", tmp_path / "loads")
    load(tmp_path / "loads" / "tests")
    here = place(tmp_path, deep)
    for call in gpu_round.CALLS:
        fine = gpu_round.call(call.name, here, "abc")
        said = (tmp_path / "out" / f"{call.name}.json").read_text() if call.steps else ""
        assert fine, said
    results = {p.stem: json.loads(p.read_text())["steps"] for p in (tmp_path / "out").iterdir()}
    assert results.keys() == {call.name for call in gpu_round.CALLS if call.steps}
    figures = {name: of for call in results.values() for name, of in call.items()}
    assert set(figures["race"]["recipes"]) == {f"smollm2_{m}" for m in gpu_round.METHODS}
    made = dict(gpu_tables.tables(figures))
    assert made.keys() == gpu_tables.TABLES.keys()
    assert len(made["race"]) == 2 + len(gpu_round.METHODS)
    assert len(made["peer"]) == 4


def test_a_step_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def fails(place, limit_s):
        raise gpu_round.StepFailed("out of luck")

    def works(place, limit_s):
        return {"value": 1}

    made = []

    def once(place, limit_s):
        made.append(1)
        return {}

    step = gpu_round.Step
    steps = (step("a", once, 1, 1), step("b", fails, 1, 1), step("c", works, 1, 1))
    monkeypatch.setattr(gpu_round, "CALLS", (gpu_round.Call("some", (), steps),))
    for _ in range(2):  # the second time does only what is missing
        assert not gpu_round.call("some", place(tmp_path, ""), "abc")
    results = json.loads((tmp_path / "out" / "some.json").read_text())
    assert results["commit"] == "abc"
    assert results["steps"]["b"]["error"] == "StepFailed: out of luck"
    assert results["steps"]["c"]["value"] == 1
    assert len(made) == 1


def test_tables_are_replaced_where_their_marks_stand():
    page = "before\n\n<!-- table: race -->\n| old |\n|---|\n| x |\n\nafter\n"
    table = ["| new |", "|---|", "| y |"]
    renewed = gpu_tables.renewed(page, "race", table)
    assert renewed == "before\n\n<!-- table: race -->\n| new |\n|---|\n| y |\n\nafter\n"
    assert gpu_tables.renewed(page, "steps", table) == page


def test_the_pages_say_what_the_last_round_measured():
    for page, text in gpu_tables.pages(ROOT, gpu_tables.RESULTS):
        assert page.read_text() == text, f"{page.name}: run python benchmarks/gpu_tables.py"
    for page, names in {
        "README.md": ("steps", "race"), "docs/performance.md": ("all-steps", "small-steps"),
    }.items():  # fmt: skip
        for name in names:
            assert f"<!-- table: {name} -->\n|" in (ROOT / page).read_text(), (page, name)
