"""A target that overflows, or whose weights hold NaN: every verb refuses it, in one line that names
the layer, the row and the likely cause. Run in this process, through the entry point."""

import json
import shutil
from dataclasses import replace

import pytest

from fledge.cli import main
from fledge.target.cache import precompute as capture
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes, make_empty, recipe_for

DAMAGED = "hold NaN: tensor model.layers.1.mlp.down_proj.weight"
OVERFLOW = "the target's answer is not finite in layer 2, row"
SERVED = ["--aux-layer-ids", "0,1,2", "--port", "0", "--device", "cpu"]
ANSWERS = ["--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def draft(overflowing_target, tiny_chats, tmp_path_factory):
    """A draft trained on the same weights in float32, where nothing overflows; without its run."""
    root = tmp_path_factory.mktemp("draft")
    recipe = recipe_for(overflowing_target, tiny_chats, root / "run", "training.steps=4")
    with (training := set_up(recipe)).parts.target:
        assert fit(training, Notes()).finished
    shutil.copytree((root / "run" / "best").resolve(), root / "draft")
    return root / "draft"


@pytest.fixture
def recipe_file(overflowing_target, tiny_chats, tmp_path):
    def make(*overrides, target=overflowing_target, dtype="float16"):
        arguments = (f"target.dtype={dtype}", *overrides)
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe_for(target, tiny_chats, tmp_path / "run", *arguments).to_yaml())
        return path

    return make


@pytest.fixture
def run(capfd):
    """Run a verb: its exit code, stdout, and the last line of stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return ended.value.code or 0, out, err.strip().splitlines()[-1] if err.strip() else ""

    return call


def refused(outcome, *parts):
    code, _, line = outcome
    assert (code, line[:8]) == (2, "fledge: "), outcome
    assert all(part in line for part in parts), line
    assert "matrix product" not in line
    return line


def test_train_refuses_before_the_first_step(run, recipe_file):
    line = refused(run("train", recipe_file()), OVERFLOW, "chats.jsonl:", "float16 overflows")
    assert "load the target in bfloat16 or float32" in line


def test_train_without_held_out_rows_ends_after_skipped_steps(run, recipe_file):
    recipe = recipe_file("data.valid_rows=0", "training.max_bad_steps=2")
    line = refused(run("train", recipe), "2 steps in a row were skipped", OVERFLOW, "chats.jsonl:")
    assert "training.lr" not in line  # it is not the draft that diverged


def test_train_from_damaged_weights(run, recipe_file, damaged_target):
    refused(run("train", recipe_file(target=damaged_target, dtype="float32")), DAMAGED)


@pytest.mark.parametrize("encoding", ["hidden", "hidden-fp8", "probs", "topk"])
def test_precompute_refuses_and_writes_no_shard(run, recipe_file, tmp_path, encoding):
    out = tmp_path / "cache"
    arguments = ["precompute", recipe_file(), "-o", out, "--encoding", encoding]
    arguments += ["--top-k", 4] if encoding == "topk" else []
    refused(run(*arguments), OVERFLOW, "chats.jsonl:", "float16 overflows")
    assert not list(out.glob("shard-*"))


def test_a_cache_dtype_that_overflows_is_refused(run, recipe_file, tmp_path):
    """The target itself is finite; its cached values would not be."""
    arguments = ["precompute", recipe_file(dtype="float32"), "-o", tmp_path / "cache"]
    refused(run(*arguments, "--dtype", "float16"), OVERFLOW, "float16 overflows")
    arguments[-1] = tmp_path / "wide"
    assert run(*arguments, "--dtype", "bfloat16")[0] == 0


def test_precompute_from_damaged_weights(run, recipe_file, damaged_target, tmp_path):
    recipe = recipe_file(target=damaged_target, dtype="float32")
    refused(run("precompute", recipe, "-o", tmp_path / "cache"), DAMAGED)


@pytest.mark.parametrize("encoding", ["hidden", "hidden-fp8", "probs"])
def test_verify_and_train_name_the_bad_rows_of_a_cache(
    run, recipe_file, tmp_path, monkeypatch, encoding
):
    """A cache made before NaN was checked for: its checksums match, but it is useless."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(capture, "row_fault", lambda *_: None)
    arguments = ["precompute", recipe_file(), "-o", cache, "--encoding", encoding]
    assert run(*arguments)[0] == 0
    code, out, _ = run("cache", "verify", cache, "--json")
    report = json.loads(out)
    assert (code, report["damaged"]) == (1, [])
    assert len(report["not_finite"]) == report["rows"]
    assert "chats.jsonl:" in report["not_finite"][0]
    assert ": layer 2, token 1" in report["not_finite"][0]  # token 0 is a special token
    assert "not finite (NaN or infinity): row 0" in run("cache", "verify", cache)[1]
    if encoding == "hidden":
        arguments = ["target.backend=cache", f"target.cached_target_path={cache}"]
        refused(run("train", recipe_file(), "target.model=null", *arguments), OVERFLOW)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_regenerate_refuses_and_writes_no_answers(
    run, overflowing_target, tiny_chats, tmp_path, temperature
):
    out = tmp_path / "answers.jsonl"
    command = ["regenerate", tiny_chats, "--out", out, "--temperature", temperature, "--limit", "3"]
    line = refused(run(*command, "--target", overflowing_target, *ANSWERS), OVERFLOW)
    assert "chats.jsonl:" in line
    assert not out.exists()


def test_regenerate_with_damaged_weights(run, damaged_target, tiny_chats, tmp_path):
    arguments = ["regenerate", tiny_chats, "--out", tmp_path / "x.jsonl", "--limit", "2"]
    refused(run(*arguments, "--target", damaged_target, *ANSWERS), DAMAGED)


def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "count to 3"}]}\n')
    return ["--prompts", path]


def test_eval_refuses_what_is_not_finite(run, draft, overflowing_target, damaged_target, tmp_path):
    arguments = ["eval", draft, *prompts(tmp_path), "--json", *ANSWERS]
    refused(run(*arguments, "--target", overflowing_target), OVERFLOW, "float16 overflows")
    refused(run(*arguments, "--target", damaged_target), DAMAGED)
    code, out, _ = run(*arguments, "--target", overflowing_target, "--dtype", "float32")
    assert code == 0
    assert json.loads(out)["drafts"][0]["acceptance_length"] >= 1.0


def test_export_refuses_what_is_not_finite(
    run, draft, overflowing_target, damaged_target, tmp_path
):
    arguments = ["export", draft, "--engine", "vllm", "--out", tmp_path / "out", *ANSWERS]
    arguments += prompts(tmp_path)
    refused(run(*arguments, "--target", overflowing_target), OVERFLOW)
    refused(run(*arguments, "--target", damaged_target), DAMAGED)
    assert not (tmp_path / "out").exists()


def test_nan_in_a_draft_is_reported_as_such(run, draft, overflowing_target, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    arguments = [*prompts(tmp_path), "--target", overflowing_target, "--dtype", "float32", *ANSWERS]
    line = refused(run("eval", broken, *arguments), "weights hold NaN", "tensor fc.weight")
    assert "plain layout" not in line


def test_serve_target_does_not_start_on_damaged_weights(run, damaged_target):
    refused(run("serve-target", "--target", damaged_target, *SERVED), DAMAGED)


@pytest.mark.parametrize("names", [(), ("lm_head.weight",), ("model.norm.weight",)])
def test_a_target_without_content_is_refused(
    run, recipe_file, draft, tiny_target, tiny_chats, tmp_path, names
):
    """Weights of zeros make every token equally likely."""
    empty = make_empty(tiny_target, tmp_path / "empty", *names)
    file, line = recipe_file(target=empty, dtype="float32"), "every token is as likely as any other"
    refused(run("train", file), line, "are its weights zero?")
    refused(run("precompute", file, "-o", tmp_path / "cache"), line)
    chats = [tiny_chats, "--out", tmp_path / "x.jsonl", "--limit", "2"]
    refused(run("regenerate", *chats, "--target", empty, *ANSWERS), line)
    refused(run("eval", draft, *prompts(tmp_path), "--target", empty, *ANSWERS), line)
    refused(run("serve-target", "--target", empty, *SERVED), line)
    exported = ["export", draft, "--engine", "vllm", "--out", tmp_path / "out", *prompts(tmp_path)]
    refused(run(*exported, "--target", empty, *ANSWERS), line)


def test_constant_states_are_refused(run, recipe_file, tiny_target, tmp_path, monkeypatch):
    """In a cache, which an engine may have written, with a head that says nothing about them."""
    cache, real = tmp_path / "cache", HFEagle3TargetModel.answer

    def answer(self, rows):
        batch = real(self, rows)
        return replace(batch, aux_hidden_states=batch.aux_hidden_states * 0 + 3)

    monkeypatch.setattr(HFEagle3TargetModel, "answer", answer)
    assert run("precompute", recipe_file(target=tiny_target, dtype="float32"), "-o", cache)[0] == 0
    arguments = ["target.backend=cache", f"target.cached_target_path={cache}", "target.model=null"]
    line = "the target's states in layer 0 are the same for every token"
    refused(run("train", recipe_file(), *arguments), line)
    arguments += ["data.valid_rows=0", "training.max_bad_steps=2", f"run.output_dir={tmp_path}/x"]
    refused(run("train", recipe_file(), *arguments), "2 steps in a row were skipped", line)


def test_a_run_that_learns_nothing_warns(run, recipe_file, tiny_target, tmp_path):
    recipe = recipe_file("training.lr=1e6", target=tiny_target, dtype="float32")
    code, out, _ = run("train", recipe, "--json")
    assert code == 0
    [warning] = json.loads(out)["warnings"]
    assert warning.startswith("the draft learned nothing: held-out acceptance length ")
    assert "training.lr (1e+06)" in warning
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("warning") for line in lines].count(warning) == 1
    code, out, _ = run("train", recipe)  # finished: it still warns
    assert code == 0
    assert "the draft learned nothing" in out
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert again == lines


def test_a_run_that_learns_does_not_warn(run, recipe_file, tiny_target):
    code, out, _ = run("train", recipe_file(target=tiny_target, dtype="float32"), "--json")
    assert (code, json.loads(out)["warnings"]) == (0, [])
