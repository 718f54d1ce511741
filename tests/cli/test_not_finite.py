"""A target that overflows, or whose weights hold NaN: every verb refuses, in one line that names
the layer, the row and the likely cause. Run in this process, through the entry point itself."""

import json
import shutil

import pytest

from fledge.cli import main
from fledge.target.cache import capture
from fledge.train.fit import fit
from fledge.train.setup import set_up
from train.tiny import Notes, recipe_for

DAMAGED = "hold NaN: tensor model.layers.1.mlp.down_proj.weight"
OVERFLOW = "the target's answer is not finite in layer 2, row"
SERVED = ["--aux-layer-ids", "0,1,2", "--port", "0", "--device", "cpu"]
ANSWERS = ["--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def draft(overflowing_target, tiny_chats, tmp_path_factory):
    """A draft of the same weights in float32, where they do not overflow; no run is around it."""
    root = tmp_path_factory.mktemp("draft")
    recipe = recipe_for(overflowing_target, tiny_chats, root / "run", "training.steps=4")
    with (training := set_up(recipe)).parts.target:
        assert fit(training, Notes()).finished
    shutil.copytree((root / "run" / "best").resolve(), root / "draft")
    return root / "draft"


@pytest.fixture
def recipe_file(overflowing_target, tiny_chats, tmp_path):
    def make(*overrides, target=overflowing_target, dtype="float16"):
        words = (f"target.dtype={dtype}", *overrides)
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe_for(target, tiny_chats, tmp_path / "run", *words).to_yaml())
        return path

    return make


@pytest.fixture
def run(capfd):
    """Run a verb: its exit code, stdout, and the last line of stderr."""

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main.run([str(word) for word in words])
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
def test_precompute(run, recipe_file, tmp_path, encoding):
    out = tmp_path / "cache"
    words = ["precompute", recipe_file(), "-o", out, "--encoding", encoding]
    words += ["--top-k", 4] if encoding == "topk" else []
    refused(run(*words), OVERFLOW, "chats.jsonl:", "float16 overflows")
    assert not list(out.glob("shard-*"))


def test_a_cache_in_a_precision_that_is_too_narrow(run, recipe_file, tmp_path):
    """The target is sound; what would be kept of it is not."""
    words = ["precompute", recipe_file(dtype="float32"), "-o", tmp_path / "cache"]
    refused(run(*words, "--dtype", "float16"), OVERFLOW, "float16 overflows")
    words[-1] = tmp_path / "wide"
    assert run(*words, "--dtype", "bfloat16")[0] == 0


def test_precompute_from_damaged_weights(run, recipe_file, damaged_target, tmp_path):
    recipe = recipe_file(target=damaged_target, dtype="float32")
    refused(run("precompute", recipe, "-o", tmp_path / "cache"), DAMAGED)


@pytest.mark.parametrize("encoding", ["hidden", "hidden-fp8", "probs"])
def test_verify_and_training_name_rows_of_a_cache(
    run, recipe_file, tmp_path, monkeypatch, encoding
):
    """A cache from before NaN was looked for: whole by its checksums, and worth nothing."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(capture.Disk, "_check", lambda *_: None)
    words = ["precompute", recipe_file(), "-o", cache, "--encoding", encoding]
    assert run(*words)[0] == 0
    code, out, _ = run("cache", "verify", cache, "--json")
    found = json.loads(out)
    assert (code, found["damaged"]) == (1, [])
    assert len(found["not_finite"]) == found["rows"]
    assert "chats.jsonl:" in found["not_finite"][0]
    assert ": layer 2, token 1" in found["not_finite"][0]  # token 0 is a special one
    assert "not finite (NaN or infinity): row 0" in run("cache", "verify", cache)[1]
    if encoding == "hidden":
        words = ["target.backend=cache", f"target.cached_target_path={cache}"]
        refused(run("train", recipe_file(), "target.model=null", *words), OVERFLOW)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_regenerate(run, overflowing_target, tiny_chats, tmp_path, temperature):
    out = tmp_path / "answers.jsonl"
    words = ["regenerate", tiny_chats, "--out", out, "--temperature", temperature, "--limit", "3"]
    said = refused(run(*words, "--target", overflowing_target, *ANSWERS), OVERFLOW)
    assert "chats.jsonl:" in said
    assert not out.exists()


def test_regenerate_by_damaged_weights(run, damaged_target, tiny_chats, tmp_path):
    words = ["regenerate", tiny_chats, "--out", tmp_path / "x.jsonl", "--limit", "2"]
    refused(run(*words, "--target", damaged_target, *ANSWERS), DAMAGED)


def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "count to 3"}]}\n')
    return ["--prompts", path]


def test_eval(run, draft, overflowing_target, damaged_target, tmp_path):
    words = ["eval", draft, *prompts(tmp_path), "--json", *ANSWERS]
    refused(run(*words, "--target", overflowing_target), OVERFLOW, "float16 overflows")
    refused(run(*words, "--target", damaged_target), DAMAGED)
    code, out, _ = run(*words, "--target", overflowing_target, "--dtype", "float32")
    assert code == 0
    assert json.loads(out)["drafts"][0]["acceptance_length"] >= 1.0


def test_export(run, draft, overflowing_target, damaged_target, tmp_path):
    words = ["export", draft, "--engine", "vllm", "--out", tmp_path / "out", *ANSWERS]
    words += prompts(tmp_path)
    refused(run(*words, "--target", overflowing_target), OVERFLOW)
    refused(run(*words, "--target", damaged_target), DAMAGED)
    assert not (tmp_path / "out").exists()


def test_a_draft_with_nan_is_named_as_that(run, draft, overflowing_target, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    words = [*prompts(tmp_path), "--target", overflowing_target, "--dtype", "float32", *ANSWERS]
    line = refused(run("eval", broken, *words), "weights hold NaN", "tensor fc.weight")
    assert "plain layout" not in line


def test_serve_target_does_not_start_on_damaged_weights(run, damaged_target):
    refused(run("serve-target", "--target", damaged_target, *SERVED), DAMAGED)


def test_a_run_that_learns_nothing_says_so(run, recipe_file, tiny_target, tmp_path):
    recipe = recipe_file("training.lr=1e6", target=tiny_target, dtype="float32")
    code, out, _ = run("train", recipe, "--json")
    assert code == 0
    [warning] = json.loads(out)["warnings"]
    assert warning.startswith("the draft learned nothing: held-out acceptance length ")
    assert "training.lr (1e+06)" in warning
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("warning") for line in lines].count(warning) == 1
    code, out, _ = run("train", recipe)  # finished: it still says so
    assert code == 0
    assert "the draft learned nothing" in out
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert again == lines


def test_a_run_that_learns_warns_of_nothing(run, recipe_file, tiny_target):
    code, out, _ = run("train", recipe_file(target=tiny_target, dtype="float32"), "--json")
    assert (code, json.loads(out)["warnings"]) == (0, [])
