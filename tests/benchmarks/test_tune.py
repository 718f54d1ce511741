"""The tuning harness: from a file of variants to acceptance lengths, across interruptions."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from test_second_target import here

import collect_curves
import tune
import tune_report
import tune_runs
from collect_curves import curve_from
from fledge.recipe.schema import load_recipe
from fledge.training.fit import evaluate, fit
from fledge.training.setup import set_up
from train.tiny import Notes

ROOT = Path(__file__).parents[2]

RECIPE = """
target: {{model: {target}, aux_layer_ids: [0, 1, 2], dtype: float32}}
data: {{valid_rows: 8, max_length: 64, workers: 1}}
packing: {{tokens: 96}}
draft: {{draft_vocab_size: 128}}
objective: {{ttt_steps: 3}}
training: {{lr: 1e-2, device: cpu}}
"""
VARIANTS = """
recipe: {recipe}
base: [training.clip=0.9]
variants:
  plain: []
  wide: [packing.tokens=128, draft.head_from_target=false]
  decayed: training.lr=5e-3
"""


@pytest.fixture(scope="module")
def place(tiny_target, tmp_path_factory):
    """Chats of two kinds, prompts, a recipe and its variants, and a separate cache."""
    place = tmp_path_factory.mktemp("tune")
    rows = [
        {
            "id": f"{'abc' if i % 4 == 0 else 'count'}/{i}",
            "messages": [
                {"role": "user", "content": f"count to {i}"},
                {"role": "assistant", "content": " ".join(str(n) for n in range(1 + i % 17))},
            ],
        }
        for i in range(60)
    ]
    prompts = [{"prompt": f"and then {i}?", "category": "other"} for i in range(3)]
    for name, lines in {"chats": rows, "eval_asked": prompts}.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / f"{name}.jsonl").write_text(text)
    (place / "recipe.yaml").write_text(RECIPE.format(target=tiny_target))
    (place / "variants.yaml").write_text(VARIANTS.format(recipe=place / "recipe.yaml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(place / "cache"))
        yield place


def command(place, out, *more, workers=0):
    return [
        str(place / "variants.yaml"), "--data", str(place / "chats.jsonl"),
        "--unseen", str(place / "eval_asked.jsonl"), "--leave-out", "abc", "--seeds", "2",
        "--tokens", "1920", "--workers", str(workers), "--max-new-tokens", "12",
        "--out", str(place / out), *more,
    ]  # fmt: skip


def runs_in(path):
    """The runs in a file of results, without clock times."""
    timed = ("seconds", "wall_s")
    runs = json.loads(path.read_text())["runs"]
    for run in runs:
        run.get("course", {}).pop("seconds", None)
    return [{k: v for k, v in run.items() if k not in timed} for run in runs]


@pytest.fixture(scope="module")
def whole(place):
    words = ["--points", "5", "--drafts", str(place / "drafts")]
    assert tune.main(command(place, "whole.json", *words)) == 0
    return place / "whole.json"


def test_every_variant_and_seed_is_trained_and_measured(whole, capsys):
    runs = runs_in(whole)
    order = [("plain", 0), ("wide", 0), ("decayed", 0), ("plain", 1), ("wide", 1), ("decayed", 1)]
    assert [(run["name"], run["seed"]) for run in runs] == order
    assert [run["steps"] for run in runs[:3]] == [20, 15, 20]  # equal tokens
    assert all(set(run["lengths"]) == {"held out", "abc", "asked"} for run in runs)
    assert all(length >= 1 for run in runs for length in run["lengths"].values())
    assert [point["step"] for point in runs[0]["curve"]] == [4, 8, 12, 16, 20]
    plain, wide = runs[:2]
    assert len({run["loss"] for run in runs}) == 6
    assert (plain["skipped"], wide["skipped"]) == (0, 0)
    tune_report.main(str(whole), str(whole.with_suffix(".svg")))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in shown[2:]] == ["| plain", "| wide", "| decayed"]
    assert "kinds not trained on" in shown[0]
    assert "+0.0 %" in shown[2]
    drawn = ElementTree.parse(whole.with_suffix(".svg")).getroot()
    assert len(drawn.findall("{*}circle")) == 2 * len(runs)


@pytest.mark.parametrize("name", ["wide-1", "decayed-0"])
def test_the_saved_drafts_are_those_that_were_measured(whole, place, tiny_target, name):
    prompts, words = str(place / "eval_asked.jsonl"), ["--max-new-tokens", "12", "--live", "0"]
    draft = ["eval", str(place / "drafts" / name), "--target", str(tiny_target)]
    [figures] = json.loads(here([*draft, "--prompts", prompts, *words, "--json"]))["drafts"]
    [run] = [run for run in runs_in(whole) if f"{run['name']}-{run['seed']}" == name]
    assert figures["acceptance_length"] == run["lengths"]["asked"]


def test_a_curve_can_be_forecast(whole, tmp_path, capsys, monkeypatch):
    """A run that was measured at several points is stored in the form `fledge forecast` reads."""
    monkeypatch.setattr("sys.argv", ["collect_curves", str(whole), "--out", str(tmp_path)])
    collect_curves.main()
    assert "| whole_decayed_1 | 20 | " in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.json"))) == 6
    curve = curve_from(json.loads((tmp_path / "whole_plain_0.json").read_text()))
    run = runs_in(whole)[0]
    assert [step for step, *_ in curve.measured] == [4, 8, 12, 16, 20]
    assert curve.measured[-1][1] == pytest.approx(run["lengths"]["held out"], abs=1e-5)
    assert (curve.course.steps, curve.depths) == (20, 3)


def test_another_method_trains_on_the_same_states(place, capsys):
    """A variant may name its own recipe, and its draft may read other layers."""
    other = (place / "recipe.yaml").read_text().replace("[0, 1, 2]", "[1, 2]")
    other = other.replace("ttt_steps: 3", "kind: dflash, block_size: 4, listened_layers: 2")
    (place / "blocks.yaml").write_text(other)
    blocks = {"recipe": str(place / "blocks.yaml"), "set": "training.lr=5e-3"}
    variants = {"recipe": str(place / "recipe.yaml"), "variants": {"chain": [], "blocks": blocks}}
    (place / "methods.yaml").write_text(json.dumps(variants))
    _, *rest = command(place, "methods.json", "--seeds", "1", "--draft-tokens", "3")
    assert tune.main([str(place / "methods.yaml"), *rest]) == 0, capsys.readouterr().err
    chain, blocks = runs_in(place / "methods.json")
    assert (chain["name"], blocks["name"]) == ("chain", "blocks")
    assert blocks["overrides"] == ["training.lr=5e-3"]
    assert set(chain["lengths"]) == set(blocks["lengths"])


def test_equal_seconds_instead_of_equal_tokens(place, monkeypatch, capsys):
    monkeypatch.setattr(tune_runs, "PROBE", 20)
    words = command(place, "timed.json", "--seconds", "1.5", "--seeds", "1", "--only", "plain")
    assert tune.main(words) == 0, capsys.readouterr().err
    [run] = runs_in(place / "timed.json")
    [timed] = json.loads((place / "timed.json").read_text())["runs"]
    assert run["steps"] > 20
    assert 0.4 < timed["seconds"] < 4  # other tests run beside this one
    assert tune.main(command(place, "timed.json", "--seconds", "9", "--seeds", "1")) == 2
    assert "begun with other seconds" in capsys.readouterr().err


def killed_at_third_run(words):
    """Tune until the third run starts, then kill this process with SIGKILL."""
    real, calls = tune_runs.Bench.run, []

    def dying(self, job):
        calls.append(job)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, job)

    tune_runs.Bench.run = dying
    torch.set_num_threads(1)
    tune.main(words)


def test_the_same_command_resumes_after_a_kill(place, whole):
    words = command(place, "cut.json", "--points", "5")
    process = multiprocessing.get_context("fork").Process(target=killed_at_third_run, args=(words,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert runs_in(place / "cut.json") == runs_in(whole)[:2]
    assert tune.main(words) == 0
    assert runs_in(place / "cut.json") == runs_in(whole)


def test_a_run_matches_fledge_train(place, whole):
    """Training the first variant on the same rows gives the same figure on its held-out rows."""
    overrides = ["training.clip=0.9", f"data.train={place / 'cache/tune/but-abc.jsonl'}"]
    overrides += ["training.steps=20", f"run.output_dir={place / 'run'}", "packing.seed=0"]
    training = set_up(load_recipe(place / "recipe.yaml", overrides))
    fit(training, Notes())
    length = evaluate(training.parts, training.held_out)["acceptance_length"]
    assert runs_in(whole)[0]["lengths"]["held out"] == pytest.approx(length, abs=0.05)


def test_no_run_is_started_that_would_end_too_late(place, capsys):
    assert tune.main(command(place, "late.json", "--minutes", "0", "--only", "plain")) == 0
    assert "2 runs are left: the same command continues" in capsys.readouterr().out
    assert not (place / "late.json").exists()


@pytest.mark.slow
def test_workers_give_the_same_results_as_one_process(place, whole):
    words = command(place, "side.json", "--points", "5", workers=2)
    assert tune.main(words) == 0
    by_id = {run["id"]: run for run in runs_in(place / "side.json")}
    for run in runs_in(whole):
        assert by_id[run["id"]]["lengths"] == run["lengths"]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (("--also", "plain+huge"), "no variant 'huge'; those there are: plain, wide, decayed"),
        (("--leave-out", "xyz"), "no rows of kind 'xyz'"),
        (("--tokens", "600"), "begun with other tokens: lengths could not be compared"),
    ],
)
def test_refusals_are_one_line(place, whole, capsys, more, complaint):
    assert tune.main(command(place, "whole.json", *more)) == 2
    assert complaint in capsys.readouterr().err


def test_invalid_variant_files_are_refused_in_one_line(place, capsys):
    bad = place / "bad.yaml"
    bad.write_text("recipe: smollm2_gpu\nvariants: {one: {recipes: smollm2_gpu}}\n")
    for path, complaint in ((bad, "a variant has no 'recipes'"), (place / "none", "No such file")):
        _, *rest = command(place, "bad.json")
        assert tune.main([str(path), *rest]) == 2
        assert complaint in capsys.readouterr().err
    assert not (place / "bad.json").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/variants").glob("*.yaml")), ids=str)
def test_the_shipped_variants_are_valid_and_distinct(path):
    variants = tune.Variants.read(path, only=(), also=())
    jobs = variants.jobs(["data.train=chats.jsonl"], tokens=8e6, seeds=1)
    assert len({job.id for job in jobs}) == len(jobs)
    dumped = [job.recipe.model_dump_json() for job in jobs]
    assert len(set(dumped)) == len(dumped), "two variants that are the same"
