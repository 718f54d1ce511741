"""`fledge retarget` from a run and a changed target to a run that every verb takes."""

import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.methods.registry import load_draft, method_of
from fledge.train.fit import fit
from fledge.train.retarget.retarget import Asked, recipe_for, retarget
from fledge.train.runs import draft_directory, recipe_of
from fledge.train.setup import set_up
from train import tiny
from train.tiny import Notes, make_chats


@pytest.fixture(scope="module")
def place(tiny_target, tmp_path_factory):
    """Chats, a target that was tuned a little, and an EAGLE-3 run for the old one."""
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


def test_from_the_command_to_a_run(place, tiny_target, tmp_path):
    out = tmp_path / "followed"
    words = ["retarget", place / "run", "--target", place / "tuned", "--data"]
    words += [place / "chats.jsonl", "--steps", "4", "--out", out, "--device", "cpu"]
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((out / "retarget.json").read_text())
    assert (found["old"], found["method"]) == (str(tiny_target), "EAGLE-3")
    assert found["taken"] == ["embedding"]  # the head was trained
    assert 0 < found["error"] < found["error_before"]
    assert found["rows"] == 72  # one conversation in ten is held out
    lost = found["length_with_old_states"] - found["length_before"]
    gained = found["length"] - found["length_before"]
    assert found["recovered"] == (pytest.approx(gained / lost) if lost > 0 else None)
    # the steps began where the refit ended, on the same held-out rows
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    begun, *_, ended = (line["evaluation"] for line in lines if "evaluation" in line)
    assert begun["acceptance_length"] == pytest.approx(found["length"])
    assert found["trained_length"] == pytest.approx(ended["acceptance_length"])
    better = "refit" if found["trained_length"] < found["length"] else "step-00000004"
    assert (out / "best").resolve().name == better
    # what was written is a run of the new target, and its refit a draft of it
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
    words = " ".join(result.output.split())
    for said in ("old target", "new target, before", "refitted", "8 held-out rows", "20 rows"):
        assert said in words
    assert "fledge eval" in words
    assert (tmp_path / "out" / "best").resolve() == tmp_path / "out" / "refit"


@pytest.mark.parametrize("kind", ["peagle", "eagle1", "eagle2", "dflash", "dspark"])
def test_every_method(place, tiny_target, tmp_path, kind):
    own = {"dflash": ["objective.block_size=4"], "dspark": ["objective.block_size=4"]}.get(kind, [])
    if own:
        own += ["objective.listened_layers=3", "draft.draft_vocab_size=null"]
    options = [f"objective.kind={kind}", *own, "draft.layers=1", "training.steps=2"]
    chats = place / "chats.jsonl"
    fit(set_up(tiny.recipe_for(tiny_target, chats, tmp_path / "run", *options)), Notes())
    asked = Asked(tmp_path / "run", str(place / "tuned"), [str(chats)], device="cpu")
    found = retarget(asked, Notes())
    assert found.directory == tmp_path / "run-retargeted"
    assert found.error < found.error_before
    draft = load_draft(found.directory / "best")
    assert method_of(draft.config).name == kind
    assert found.taken == (("embedding", "head") if kind in ("eagle1", "eagle2") else ())


def test_a_draft_without_a_run(place, tmp_path):
    """It does not know its target; its recipe is that of its method, as long as it drafts."""
    alone = tmp_path / "alone"
    shutil.copytree((place / "run" / "best").resolve(), alone)
    asked = Asked(alone, str(place / "tuned"), [str(place / "chats.jsonl")], device="cpu")
    with pytest.raises(BadInput, match=r"which target was it trained for\?.*--old MODEL") as told:
        retarget(asked, Notes())
    assert "draft.init_from=DRAFT" in str(told.value)
    recipe = recipe_for(asked, alone, tmp_path / "out")
    assert recipe.objective.kind == "eagle3"
    assert recipe.objective.depths == 3
    assert recipe.target.aux_layer_ids == (0, 1, 2)
    gone = run("retarget", alone, "--target", place / "tuned", "--old", tmp_path / "gone",
               "--data", place / "chats.jsonl", "--device", "cpu")  # fmt: skip
    assert isinstance(gone.exception, BadInput)
    assert "the old target: no such model" in str(gone.exception)
    assert "draft.init_from=DRAFT" in str(gone.exception)


def test_another_model_is_no_changed_one(place, tiny_target, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    model.config.num_hidden_layers = 5
    other = LlamaForCausalLM(model.config)
    shutil.copytree(tiny_target, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    asked = Asked(
        place / "run", str(tmp_path / "other"), [str(place / "chats.jsonl")],
        out=tmp_path / "out", device="cpu",
    )  # fmt: skip
    with pytest.raises(BadInput, match="have layers 4 and 5"):
        retarget(asked, Notes())
    few = make_chats(tmp_path / "few.jsonl", 4)
    with pytest.raises(BadInput, match="too few to fit"):
        retarget(
            Asked(place / "run", str(place / "tuned"), [str(few)], out=tmp_path / "x"), Notes()
        )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "x").exists()
