"""`fledge retarget`: from a run and a changed target to a run that every command accepts."""

import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.methods.registry import load_draft, method_of
from fledge.recipe.schema import load_recipe
from fledge.training.fit import fit
from fledge.training.retarget import recipe_for, retarget
from fledge.training.runs import recipe_of
from fledge.training.setup import set_up
from train import tiny
from train.tiny import Notes, make_chats


@pytest.fixture(scope="module")
def place(tiny_target, tmp_path_factory):
    """Chats, a slightly fine-tuned target, and an EAGLE-3 run for the original one."""
    root = tmp_path_factory.mktemp("retarget")
    chats = make_chats(root / "chats.jsonl", 80)
    shutil.copytree(tiny_target, root / "tuned")
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight):
                weight.add_(torch.randn_like(weight) * weight.std() * 40)
        model.model.embed_tokens.weight[7] += 0.5
    model.save_pretrained(root / "tuned")
    fit(set_up(tiny.recipe_for(tiny_target, chats, root / "run", "training.epochs=9")), Notes())
    return root


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def test_the_command_produces_a_draft_that_can_be_trained_further(place, tiny_target, tmp_path):
    out = tmp_path / "followed"
    words = ["retarget", place / "run", "--target", place / "tuned", "--data"]
    words += [place / "chats.jsonl", "--out", out, "--device", "cpu"]
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures == json.loads((out / "retarget.json").read_text())
    assert (figures["old"], figures["method"]) == (str(tiny_target), "EAGLE-3")
    assert figures["taken"] == ["embedding"]  # the head was trained
    assert 0 < figures["error"] < figures["error_before"]
    assert figures["rows"] == 72  # one conversation in ten is held out
    assert recipe_of(out).target.model == str(place / "tuned")
    before, after = load_draft(place / "run" / "best"), load_draft(out)
    changed = [name for name, value in after.state_dict().items()
               if not torch.equal(value, before.state_dict()[name])]  # fmt: skip
    assert changed == ["embed_tokens.weight", "fc.weight"]
    assert "already exists" in str(run(*words).exception)
    # training starts where the refit ended, on the same held-out rows
    outcome = fit(set_up(load_recipe(out / "recipe.yaml", ["training.steps=2"])), Notes())
    assert outcome.state.first["acceptance_length"] == pytest.approx(figures["length"])
    assert (tmp_path / "followed-trained" / "best").exists()


def test_tables_are_shown(place, tmp_path):
    result = run(
        "retarget", place / "run", "--target", place / "tuned", "--data", place / "chats.jsonl",
        "--out", tmp_path / "out", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for text in ("old target", "new target, before", "refitted", "8 held-out rows", "72 rows"):
        assert text in shown
    assert "fledge train" in shown


@pytest.mark.parametrize("kind", ["peagle", "eagle1", "eagle2", "dflash", "dspark"])
def test_every_method_can_be_retargeted(place, tiny_target, tmp_path, kind):
    more = {"dflash": ["objective.block_size=4"], "dspark": ["objective.block_size=4"]}.get(
        kind, []
    )
    if more:
        more += ["objective.listened_layers=3", "draft.draft_vocab_size=null"]
    options = [f"objective.kind={kind}", *more, "draft.layers=1", "training.steps=2"]
    chats = place / "chats.jsonl"
    fit(set_up(tiny.recipe_for(tiny_target, chats, tmp_path / "run", *options)), Notes())
    result = retarget(tmp_path / "run", str(place / "tuned"), [str(chats)], device="cpu")
    assert result.directory == str(tmp_path / "run-retargeted")
    assert result.error < result.error_before
    assert method_of(load_draft(result.directory).config).name == kind
    assert result.taken == (("embedding", "head") if kind in ("eagle1", "eagle2") else ())


def test_a_draft_without_a_run(place, tmp_path):
    """It does not name its target; the recipe has its method's defaults and its draft length."""
    draft_path, tuned, chats = tmp_path / "alone", str(place / "tuned"), str(place / "chats.jsonl")
    shutil.copytree((place / "run" / "best").resolve(), draft_path)
    with pytest.raises(BadInput, match=r"which target was it trained for\?.*--old MODEL") as error:
        retarget(draft_path, tuned, [chats], device="cpu")
    assert "draft.init_from=DRAFT" in str(error.value)
    recipe = recipe_for(draft_path, tuned, [chats], tmp_path / "out")
    assert recipe.objective.kind == "eagle3"
    assert recipe.objective.depths == 3
    assert recipe.target.aux_layer_ids == (0, 1, 2)


def test_a_different_model_is_rejected(place, tiny_target, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    model.config.num_hidden_layers = 5
    other = LlamaForCausalLM(model.config)
    shutil.copytree(tiny_target, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    few = make_chats(tmp_path / "few.jsonl", 4)
    for target, data, says in (
        (tmp_path / "other", place / "chats.jsonl", "depth of 4 and 5"),
        (place / "tuned", few, "too few to fit"),
    ):
        with pytest.raises(BadInput, match=says):
            retarget(place / "run", str(target), [str(data)], out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
