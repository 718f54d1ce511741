"""EAGLE-1, DFlash and DSpark from a recipe to figures: the same loop, caches and commands."""

import json

import pytest
from typer.testing import CliRunner

from data.chats import write_jsonl
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.formats.engines import serve_command
from fledge.formats.export import export_draft, read_export_record
from fledge.formats.self_check import CheckOptions
from fledge.methods.registry import METHODS, load_draft, method_of
from fledge.recipe.schema import load_recipe
from fledge.training.drafts import target_section
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.test_fit import differing
from train.tiny import BLOCKS, Notes

KINDS = [*BLOCKS]
ENGINES = ("vllm", "sglang", "speculators")  # llama.cpp: tests/engines/llamacpp


def run(*arguments, text=None):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], input=text)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1] if text else result.stdout)


@pytest.fixture
def block(recipe):
    return lambda kind, *overrides, run="run": recipe(*BLOCKS[kind], *overrides, run=run)


@pytest.mark.parametrize("kind", KINDS)
def test_eval_and_chat(block, kind, tmp_path):
    fit(set_up(block(kind)), Notes())
    best = tmp_path / "run" / "best"
    prompts = tmp_path / "prompts.jsonl"
    write_jsonl(prompts, [{"prompt": f"count to {n}"} for n in (3, 9, 12)])
    calibrated = tmp_path / "run" / "calibrated"
    options = ("--prompts", prompts, "--max-new-tokens", 24, "--device", "cpu")
    measured = run(
        "eval", best, *options, *(("--calibrated", calibrated) if kind == "dspark" else ())
    )
    report = measured["drafts"][0]
    assert report["method"] == method_of(load_draft(best).config).own_strategy
    assert report["live"]["texts"] == report["live"]["same_texts"] == 3
    assert report["live"]["compared_rounds"] == report["live"]["same_rounds"] > 0
    if kind == "dspark":
        temperatures = load_draft(calibrated).config.confidence_temperatures
        assert temperatures == report["calibration"]["temperatures"]
        assert len(temperatures) == 4
        again = run("eval", calibrated, *options)["drafts"][0]
        assert again["calibration"]["temperatures"] == temperatures  # fitted to the raw odds
        assert again["acceptance_length"] == report["acceptance_length"]
        shown = CliRunner().invoke(app, ["eval", *map(str, (best, *options))]).output
        assert "how sure best is, and how right" in shown
        refused = CliRunner().invoke(app, ["eval", str(best), "--calibrated", str(calibrated)])
        assert "is there already" in str(refused.exception)
    else:
        assert "calibration" not in report
    answer = run("chat", best, "--max-new-tokens", 12, "--device", "cpu", text="count to 7\n")
    assert answer["text"]


@pytest.mark.parametrize(
    ("kind", "engine"),
    [(kind, engine) for kind in KINDS for engine in METHODS[kind].formats if engine in ENGINES],
)
def test_a_run_is_exported_diagnosed_imported_and_served(block, kind, engine, tmp_path):
    """The files decode as the checkpoint does, and importing them gives that checkpoint back."""
    fit(set_up(block(kind, "training.steps=2")), Notes())
    out, target = tmp_path / "out", block(kind).target.model
    few = ("--limit", 2, "--max-new-tokens", 8)
    version = ("--engine-version", "0.33.0") if (kind, engine) == ("xpress", "vllm") else ()
    record = run("export", tmp_path / "run", "--engine", engine, "--out", out, *few, *version)
    check = record["self_check"]
    assert (record["kind"].lower().replace(" ", ""), record["out"]) == (kind, str(out))
    assert record["mask_token_id"] is not None
    assert check["decoded"]["prompts"] == 2
    assert check["same_rows"] == check["estimate"]  # float32 on one machine: bit for bit
    assert check["decoded"]["same_as_checkpoint"]
    loader = "vllm" if engine == "speculators" else engine  # the engine that serves this format
    diagnosis = run("diagnose", out, "--target", target, "--engine", loader, "--static")
    assert [entry for entry in diagnosis["findings"] if entry["level"] == "error"] == []
    back = tmp_path / "back"
    assert run("import", out, "--target", target, "--out", back)["aux_layer_ids"]
    trained, imported = (
        load_draft(path).state_dict() for path in (tmp_path / "run" / "best", back)
    )
    assert differing(trained, imported) == []
    words = run("serve", out, "--target", target)
    assert any(method_of_kind(kind, loader) in word for word in words)


def method_of_kind(kind, engine):
    """The engine's own name for the algorithm."""
    return METHODS[kind].algorithms[engine]


def test_a_dspark_run_can_start_from_a_dflash_run(block, tmp_path):
    size = "objective.block_size=4"
    fit(set_up(block("dflash", size, run="first")), Notes())
    start = f"draft.init_from={tmp_path / 'first'}"
    layers = ("objective.listened_layers=3", "target.aux_layer_ids=0,1,2")
    training = set_up(block("dspark", start, size, *layers, run="second"))
    first = load_draft(tmp_path / "first" / "best")
    assert training.draft.whole
    assert (training.draft.fc.weight == first.fc.weight).all()
    assert fit(training, Notes()).finished


@pytest.mark.parametrize(
    ("objective", "ids"),
    [
        (["dflash", "listened_layers=3"], (1, 14, 27)),
        (["dspark", "listened_layers=1"], (15,)),
        (["dflash"], (1, 8, 14, 20, 27)),
        (["eagle3"], (1, 14, 26)),
        (["eagle1"], (30,)),
    ],
)
def test_each_method_chooses_its_default_layers(objective, ids):
    """Of SmolLM2's 30 layers. A block draft with three layers does not read those of EAGLE-3, and
    one with a single layer not that of EAGLE-1."""
    kind, *rest = objective
    recipe = load_recipe(None, [f"objective.kind={kind}", *(f"objective.{key}" for key in rest)])
    assert target_section(recipe).aux_layer_ids == ids
    named = load_recipe(None, ["target.aux_layer_ids=3,5,7"])
    assert target_section(named).aux_layer_ids == (3, 5, 7)


def test_four_methods_are_evaluated_side_by_side(block, recipe, tmp_path, monkeypatch):
    """One target, one table: each draft reads its own layers, and has the same figures as alone."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    few = ("training.steps=2", "data.valid_rows=8")
    runs = {
        "eagle3": recipe(*few, run="eagle3"),
        "peagle": recipe("objective.kind=peagle", "draft.layers=2", *few, run="peagle"),
        "dflash": block("dflash", *few, run="dflash"),
        "dspark": block("dspark", *few, run="dspark"),
    }
    for run_recipe in runs.values():
        fit(set_up(run_recipe), Notes())
    (tmp_path / "asked.jsonl").write_text('{"prompt": "count to 5"}\n{"prompt": "count to 9"}\n')
    options = ("--prompts", tmp_path / "asked.jsonl", "--max-new-tokens", 12, "--device", "cpu")
    paths = [tmp_path / name for name in runs]
    together = run("eval", *paths, *options, "--live", 1)["drafts"]
    assert [draft["method"] for draft in together] == ["chain", "parallel", "block", "markov"]
    assert [draft["draft"] for draft in together] == list(runs)
    assert all(draft["live"]["agrees"] for draft in together)
    for path, draft in zip(paths, together, strict=True):
        [alone] = run("eval", path, *options, "--live", 0)["drafts"]
        assert alone["acceptance_length"] == draft["acceptance_length"]
        assert alone["joint"] == draft["joint"]
    shown = CliRunner().invoke(app, ["eval", *map(str, (*paths, *options)), "--live", "1"])
    assert shown.exit_code == 0
    acceptance = shown.output.partition("by category")[0]
    assert all(name in acceptance for name in runs)


# --- EAGLE-1 and EAGLE-2 -------------------------------------------------------------------------


@pytest.fixture
def eagle1(recipe):
    def make(*overrides, run="run", kind="eagle1"):
        return recipe(f"objective.kind={kind}", "training.steps=8", *overrides, run=run)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle2", "mtp"])
def test_evaluated_and_exported(eagle1, tmp_path, tiny_target, kind):
    fit(set_up(eagle1(kind=kind)), Notes())
    prompts = tmp_path / "prompts.jsonl"
    write_jsonl(prompts, [{"prompt": f"count to {n}"} for n in range(4)])
    for method in ("chain", "tree"):
        [draft] = run(
            "eval", tmp_path / "run", "--prompts", prompts, "--live", "3", "--method", method,
            "--max-new-tokens", "16", "--dtype", "float32", "--device", "cpu",
        )["drafts"]  # fmt: skip
        assert draft["live"]["same_texts"] == draft["live"]["texts"]
        if method == "chain":
            assert draft["live"]["same_rounds"] == draft["live"]["compared_rounds"] > 0
    for engine in ("vllm", "sglang"):
        out = tmp_path / engine
        check = CheckOptions(limit=2, shortfall=1.0)  # the chats are not the target's answers
        export_draft(tmp_path / "run", out, engine=engine, check=check)
        record = read_export_record(out)
        assert record["self_check"]["same_rows"] == record["self_check"]["estimate"]
        assert record["objective"] == kind
        assert record["self_check"]["decoded"]["same_as_checkpoint"]
        command = serve_command(record, str(out), target="T")
        if engine == "vllm":
            config_json = command[command.index("--speculative-config") + 1]
            assert json.loads(config_json)["method"] == METHODS[kind].algorithms["vllm"]
            assert ("--hf-overrides" in command) == (kind == "mtp")
        else:
            name = METHODS[kind].algorithms["sglang"]
            assert command[command.index("--speculative-algorithm") + 1] == name
            topk = command[command.index("--speculative-eagle-topk") + 1]
            assert topk == ("4" if kind == "eagle2" else "1")
    with pytest.raises(BadInput, match="does not read"):
        export_draft(tmp_path / "run", tmp_path / "no", engine="speculators")


@pytest.mark.slow
def test_eagle2_can_start_from_an_eagle1_draft(eagle1, recipe, tmp_path):
    fit(set_up(eagle1(run="one")), Notes())
    start = f"draft.init_from={tmp_path / 'one'}"
    training = set_up(eagle1(start, kind="eagle2", run="two"))
    assert method_of(training.draft.config).name == "eagle2"
    before = load_draft(tmp_path / "one" / "best").state_dict()
    assert differing(before, training.draft.state_dict()) == []
    with pytest.raises(BadInput, match="EAGLE-1"):
        set_up(recipe(start, run="three"))
