"""A target that overflows, or whose weights hold NaN: every verb refuses it, in one line that names
the layer, the row and the likely cause. Run in this process, through the entry point."""

import json
import shutil

import pytest

from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.tiny import Notes, recipe_for

DAMAGED = "hold NaN or infinity: tensor model.layers.1.mlp.down_proj.weight"
OVERFLOW = "the target's answer is not finite in "
PROMPTS = '{"messages": [{"role": "user", "content": "count to 3"}]}\n'
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


def refused(ended, *parts):
    line = ended.err.strip().splitlines()[-1]
    assert (ended.code, line[:8]) == (2, "fledge: "), ended
    assert all(part in line for part in parts), line
    assert "matrix product" not in line
    return line


VERBS = {
    "train": ["{recipe}"],
    "precompute": ["{recipe}", "-o", "{out}"],
    "regenerate": ["{chats}", "--out", "{out}/x.jsonl", "--limit", "3", *ANSWERS],
    "eval": ["{draft}", "--prompts", "{prompts}", *ANSWERS],
    "export": ["{draft}", "--engine", "vllm", "--out", "{out}", "--prompts", "{prompts}", *ANSWERS],
    "serve-target": ["--aux-layer-ids", "0,1,2", "--port", "0", "--device", "cpu"],
}
TARGETS = {"overflowing": OVERFLOW, "damaged": DAMAGED}
CASES = [(verb, kind) for verb in VERBS for kind in TARGETS]
CASES.remove(("serve-target", "overflowing"))  # it answers nothing before it is asked
CASES.remove(("regenerate", "damaged"))  # it does not look for the cause


@pytest.mark.parametrize(("verb", "kind"), CASES)
def test_every_verb_refuses_the_target(
    fledge, request, recipe_file, draft, tiny_chats, tmp_path, verb, kind
):
    target = request.getfixturevalue(f"{kind}_target")
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    recipe = recipe_file(target=target, dtype="float16" if kind == "overflowing" else "float32")
    places = {"recipe": recipe, "draft": draft, "chats": tiny_chats, "out": tmp_path / "out",
              "prompts": tmp_path / "prompts.jsonl"}  # fmt: skip
    words = [word.format(**places) for word in VERBS[verb]]
    words += [] if "{recipe}" in VERBS[verb] else ["--target", target]
    line = refused(fledge(verb, *words), TARGETS[kind])
    assert "float16 overflows" in line or kind != "overflowing"
    assert ".jsonl:" in line or kind != "overflowing" or verb in ("eval", "export", "regenerate")
    said = "load the target in bfloat16 or float32" in line
    assert said or (verb, kind) != ("train", "overflowing")
    assert not [*(tmp_path / "out").glob("shard-*"), *(tmp_path / "out").glob("model.safetensors")]


def test_train_without_held_out_rows_ends_after_skipped_steps(fledge, recipe_file):
    recipe = recipe_file("data.valid_rows=0", "training.max_bad_steps=2")
    line = refused(fledge("train", recipe), "2 steps in a row were skipped", OVERFLOW, ".jsonl:")
    assert "training.lr" not in line  # it is not the draft that diverged


@pytest.mark.parametrize("encoding", ["hidden-fp8", "probs", "topk"])
def test_precompute_refuses_and_writes_no_shard(fledge, recipe_file, tmp_path, encoding):
    out = tmp_path / "cache"
    arguments = ["precompute", recipe_file(), "-o", out, "--encoding", encoding]
    arguments += ["--top-k", 4] if encoding == "topk" else []
    refused(fledge(*arguments), OVERFLOW, ".jsonl:", "float16 overflows")
    assert not list(out.glob("shard-*"))


def test_a_cache_dtype_that_overflows_is_refused(fledge, recipe_file, tmp_path):
    """The target itself is finite; its cached values would not be."""
    arguments = ["precompute", recipe_file(dtype="float32"), "-o", tmp_path / "cache"]
    refused(fledge(*arguments, "--dtype", "float16"), OVERFLOW, "float16 overflows")
    arguments[-1] = tmp_path / "wide"
    assert fledge(*arguments, "--dtype", "bfloat16")[0] == 0


def test_sampled_answers_are_checked_too(fledge, overflowing_target, tiny_chats, tmp_path):
    out = tmp_path / "answers.jsonl"
    command = ["regenerate", tiny_chats, "--out", out, "--temperature", "1", "--limit", "3"]
    refused(fledge(*command, "--target", overflowing_target, *ANSWERS), OVERFLOW)
    assert not out.exists()


def test_eval_measures_in_a_dtype_that_does_not_overflow(
    fledge, draft, overflowing_target, tmp_path
):
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    command = ["eval", draft, "--prompts", tmp_path / "prompts.jsonl", "--json", *ANSWERS]
    ended = fledge(*command, "--target", overflowing_target, "--dtype", "float32")
    assert ended.code == 0
    assert json.loads(ended.out)["drafts"][0]["acceptance_length"] >= 1.0


def test_nan_in_a_draft_is_reported_as_such(fledge, draft, overflowing_target, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    command = ["eval", broken, "--prompts", tmp_path / "prompts.jsonl", "--dtype", "float32"]
    ended = fledge(*command, "--target", overflowing_target, *ANSWERS)
    line = refused(ended, "tensor fc.weight")
    assert "plain layout" not in line


def test_a_run_that_learns_nothing_warns(fledge, recipe_file, tiny_target, tmp_path):
    recipe = recipe_file("training.lr=1e6", target=tiny_target, dtype="float32")
    code, out, _ = fledge("train", recipe, "--json")
    assert code == 0
    [warning] = json.loads(out)["warnings"]
    assert warning.startswith("the draft learned nothing: held-out acceptance length ")
    assert "training.lr (1e+06)" in warning
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    code, out, _ = fledge("train", recipe)  # finished: it still warns
    assert code == 0
    assert "the draft learned nothing" in out
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert again == lines


def test_a_run_that_learns_does_not_warn(fledge, recipe_file, tiny_target):
    code, out, _ = fledge("train", recipe_file(target=tiny_target, dtype="float32"), "--json")
    assert (code, json.loads(out)["warnings"]) == (0, [])
