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
from fledge.training.fit import fit
from fledge.training.retarget import Asked, recipe_for, retarget
from fledge.training.runs import draft_directory, recipe_of
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


def test_the_command_produces_a_run(place, tiny_target, tmp_path):
    out = tmp_path / "followed"
    words = ["retarget", place / "run", "--target", place / "tuned", "--data"]
    words += [place / "chats.jsonl", "--steps", "4", "--out", out, "--device", "cpu"]
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures == json.loads((out / "retarget.json").read_text())
    assert (figures["old"], figures["method"]) == (str(tiny_target), "EAGLE-3")
    assert figures["taken"] == ["embedding"]  # the head was trained
    assert 0 < figures["error"] < figures["error_before"]
    assert figures["rows"] == 72  # one conversation in ten is held out
    lost = figures["length_with_old_states"] - figures["length_before"]
    gained = figures["length"] - figures["length_before"]
    assert figures["recovered"] == (pytest.approx(gained / lost) if lost > 0 else None)
    # training started where the refit ended, on the same held-out rows
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (line["evaluation"] for line in lines if "evaluation" in line)
    assert first["acceptance_length"] == pytest.approx(figures["length"])
    assert figures["trained_length"] == pytest.approx(last["acceptance_length"])
    better = "refit" if figures["trained_length"] < figures["length"] else "step-00000004"
    assert (out / "best").resolve().name == better
    # the output is a run for the new target, and its refit is a draft for it
    draft = draft_directory(out)
    assert recipe_of(draft).target.model == str(place / "tuned")
    assert recipe_of(out / "refit").target.model == str(place / "tuned")
    before, after = load_draft(place / "run" / "best"), load_draft(out / "refit")
    changed = [name for name, value in after.state_dict().items()
               if not torch.equal(value, before.state_dict()[name])]  # fmt: skip
    assert changed == ["embed_tokens.weight", "fc.weight"]
    assert "already exists" in str(run(*words).exception)


def test_tables_are_shown(place, tmp_path):
    result = run(
        "retarget", place / "run", "--target", place / "tuned", "--data", place / "chats.jsonl",
        "--out", tmp_path / "out", "--rows", "20", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for text in ("old target", "new target, before", "refitted", "8 held-out rows", "20 rows"):
        assert text in shown
    assert "fledge eval" in shown
    assert (tmp_path / "out" / "best").resolve() == tmp_path / "out" / "refit"


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
    request = Asked(tmp_path / "run", str(place / "tuned"), [str(chats)], device="cpu")
    result = retarget(request, Notes())
    assert result.directory == tmp_path / "run-retargeted"
    assert result.error < result.error_before
    draft = load_draft(result.directory / "best")
    assert method_of(draft.config).name == kind
    assert result.taken == (("embedding", "head") if kind in ("eagle1", "eagle2") else ())


def test_a_draft_without_a_run(place, tmp_path):
    """It does not name its target; the recipe has its method's defaults and its draft length."""
    draft_path = tmp_path / "alone"
    shutil.copytree((place / "run" / "best").resolve(), draft_path)
    request = Asked(draft_path, str(place / "tuned"), [str(place / "chats.jsonl")], device="cpu")
    with pytest.raises(BadInput, match=r"which target was it trained for\?.*--old MODEL") as error:
        retarget(request, Notes())
    assert "draft.init_from=DRAFT" in str(error.value)
    recipe = recipe_for(request, draft_path, tmp_path / "out")
    assert recipe.objective.kind == "eagle3"
    assert recipe.objective.depths == 3
    assert recipe.target.aux_layer_ids == (0, 1, 2)
    result = run("retarget", draft_path, "--target", place / "tuned", "--old", tmp_path / "gone",
                 "--data", place / "chats.jsonl", "--device", "cpu")  # fmt: skip
    assert isinstance(result.exception, BadInput)
    assert "the old target: no such model" in str(result.exception)
    assert "draft.init_from=DRAFT" in str(result.exception)


def test_a_different_model_is_rejected(place, tiny_target, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    model.config.num_hidden_layers = 5
    other = LlamaForCausalLM(model.config)
    shutil.copytree(tiny_target, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    request = Asked(
        place / "run", str(tmp_path / "other"), [str(place / "chats.jsonl")],
        out=tmp_path / "out", device="cpu",
    )  # fmt: skip
    with pytest.raises(BadInput, match="have layers 4 and 5"):
        retarget(request, Notes())
    few = make_chats(tmp_path / "few.jsonl", 4)
    with pytest.raises(BadInput, match="too few to fit"):
        retarget(
            Asked(place / "run", str(place / "tuned"), [str(few)], out=tmp_path / "x"), Notes()
        )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "x").exists()
