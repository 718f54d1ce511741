"""Heads that models ship: read from the target's files, equal to transformers' own, tuned, stitched
back and read again."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.methods.mtp.checkpoint import read_head
from fledge.methods.mtp.families import FAMILIES
from fledge.methods.registry import METHODS, load_draft
from fledge.models.resolve import load_config
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train import tiny

_SIZES = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_GATED = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
_GLM = {
    "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
TARGETS = {
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**_SIZES | _GATED),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**_SIZES | _GATED | _EXPERTS),
    "deepseek": lambda: transformers.DeepseekV3Config(**_SIZES | _LATENT),
    "glm": lambda: transformers.Glm4MoeConfig(**_SIZES | _GLM),
}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory, tiny_target):
    """A tiny target of a kind, with a random head in its files under the names of its family."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = _make(kind, tmp_path_factory.mktemp(kind) / "target", tiny_target)
        return made[kind]

    return make


@torch.no_grad()
def _make(kind, directory, tiny_target):
    torch.manual_seed(0)
    shutil.copytree(tiny_target, directory)  # its tokenizer
    model = transformers.AutoModelForCausalLM.from_config(TARGETS[kind]()).float()
    for weight in model.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    # its last layer is of the same kind as the head's, and already under the names of the files
    prefix = next(n for n in tensors if ".layers.3." in n).partition("layers.3.")[0] + "layers.3."
    last = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    family = FAMILIES["qwen" if "qwen" in kind else "deepseek"]
    size = model.config.hidden_size
    own = {name: torch.randn(size) for name in ("embedding_norm", "hidden_norm", "norm")}
    head = {family.names[f"{name}.weight"]: 0.3 * value for name, value in own.items()}
    head[family.names["fc.weight"]] = 0.3 * torch.randn(size, 2 * size)
    for name, value in one_by_one(last).items():
        noise = 0.2 * torch.randn_like(value) if value.is_floating_point() else 0
        tensors[family.layer_prefix.format(layers=4) + name] = (value + noise).contiguous()
    tensors |= {family.prefix.format(layers=4) + name: value for name, value in head.items()}
    save_file(tensors, path, {"format": "pt"})
    return directory


def one_by_one(layer):
    """Experts as released checkpoints have them: each matrix by itself."""
    out = {}
    for name, value in layer.items():
        before, stacked, _ = name.partition("mlp.experts.")
        if not stacked or name.endswith(".weight"):
            out[name] = value
            continue
        for i, expert in enumerate(value):
            names = ("down_proj",) if "down" in name else ("gate_proj", "up_proj")
            parts = dict(zip(names, expert.chunk(len(names)), strict=True))
            out |= {f"{before}{stacked}{i}.{part}.weight": x for part, x in parts.items()}
    return out


def draft_of(directory, target):
    method = METHODS["mtp"]
    settings = method.draft_settings(None, tokenizer=None, vocab_size=400)
    draft = method.draft_type()(method.derive(load_config(str(directory)), **settings))
    draft.load_state_dict(read_head(directory, draft))
    draft.borrow_from(target)
    return draft.eval()


@pytest.mark.parametrize("kind", TARGETS)
@torch.no_grad()
def test_a_shipped_head_computes_what_transformers_does(shipped, kind, monkeypatch):
    directory = shipped(kind)
    target = HFEagle3TargetModel.from_pretrained(
        str(directory), dtype=torch.float32, device="cpu", num_aux_layers=1
    )
    draft = draft_of(directory, target)
    # transformers reads the embedding at position 0, vLLM and SGLang do not
    family = replace(draft.spec.family, blank_start=False)
    monkeypatch.setitem(FAMILIES, family.name, family)
    ids_1T = torch.randint(0, 400, (1, 12), generator=torch.Generator().manual_seed(1))
    answer = target.generate_batch(ids_1T, torch.ones_like(ids_1T), torch.ones_like(ids_1T))
    plan = plan_rollout(
        RowMasks(torch.ones_like(ids_1T), torch.ones_like(ids_1T)), num_depths=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    [ours] = draft.unroll(answer.aux_hidden_states[0], answer.input_ids[0], plan)
    model = target.model
    theirs = _theirs(model, draft.state_dict())
    decoder = model.get_decoder()
    place_1T = torch.arange(12)[None]
    places = place_1T.expand(3, 1, -1) if kind == "qwen3.5" else place_1T  # of three axes
    embedding = decoder.embed_tokens(answer.input_ids)
    mask = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    out = theirs(
        embedding, answer.aux_hidden_states, attention_mask=mask, position_ids=place_1T,
        position_embeddings=decoder.rotary_emb(embedding, places), past_key_values=None,
    )  # fmt: skip
    expected = model.lm_head(out)[0, plan.slot_T[plan.depths[0].slot_N]]
    got = ours @ draft.lm_head.weight.T
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert got.std() > 0.1


def _theirs(model, ours):
    """transformers' own head with the weights that we read."""
    decoder = model.get_decoder()
    layer_type, norm_type = type(decoder.layers[3]), type(decoder.norm)
    model.config._attn_implementation = "eager"
    layer = MtpLayer(model.config, layer_type, norm_type, 3)
    parts = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm"}
    parts |= {"norm": "post_norm"}
    state = {
        f"mtp_block.{name.removeprefix('layers.0.')}"
        if name.startswith("layers.0.")
        else f"{parts[name.removesuffix('.weight')]}.weight": tensor
        for name, tensor in ours.items()
    }
    layer.load_state_dict(state)
    return layer.eval()


def check_live(tmp_path):
    """Texts are the target's own, and replay predicts the rounds."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "count to {n}"}}\n' for n in range(3)))
    words = [
        "eval", tmp_path / "run", "--prompts", prompts, "--live", "3", "--draft-tokens", "3",
        "--max-new-tokens", "16", "--dtype", "float32", "--device", "cpu", "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    live = json.loads(result.stdout)["drafts"][0]["live"]
    assert live["same_texts"] == live["texts"] == 3  # as the target decodes without a draft
    assert live["same_rounds"] == live["compared_rounds"] > 0  # as replay predicted


@pytest.mark.parametrize("kind", TARGETS)
def test_a_shipped_head_is_tuned_and_stitched(shipped, kind, tmp_path):
    directory, chats = shipped(kind), tiny.make_chats(tmp_path / "chats.jsonl")
    steps = 50 if kind in ("qwen3.5", "deepseek") else 4
    recipe = tiny.recipe_for(
        directory, chats, tmp_path / "run", "objective.kind=mtp", f"training.steps={steps}",
        "draft.init_from=target", "training.lr=1e-3", "evaluation.every_steps=25",
        "checkpoint.every_steps=25",
    )  # fmt: skip
    notes = tiny.Notes()
    assert fit(set_up(recipe), notes).finished
    assert notes.lines[-1]["loss"] < notes.lines[0]["loss"]
    if "qwen" not in kind:  # linear attention cannot take back tokens: no live decoding here
        check_live(tmp_path)
    tuned, out = load_draft(tmp_path / "run" / "best").state_dict(), tmp_path / "stitched"
    words = ["stitch", tmp_path / "run", "--target", directory, "--out", out]
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    again = read_head(out, load_draft(tmp_path / "run" / "best"))
    assert again.keys() == tuned.keys()
    assert all(torch.equal(tuned[name], tensor) for name, tensor in again.items())
    old, new = (load_file(path / "model.safetensors") for path in (directory, out))
    assert old.keys() == new.keys()
    prefix = "mtp." if "qwen" in kind else "model.layers.4."
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed
    assert all(name.startswith(prefix) for name in changed)
    linked = out / "tokenizer.json"
    assert linked.stat().st_ino == (directory / "tokenizer.json").stat().st_ino


def test_without_a_head_in_the_files(tiny_target, tmp_path):
    chats = tiny.make_chats(tmp_path / "chats.jsonl")
    options = ("objective.kind=mtp", "draft.init_from=target")
    with pytest.raises(BadInput, match=r"none is named model\.mtp_layers"):
        set_up(tiny.recipe_for(tiny_target, chats, tmp_path / "run", *options))
    with pytest.raises(BadInput, match="no model ships a draft of EAGLE-3"):
        set_up(tiny.recipe_for(tiny_target, chats, tmp_path / "run", "draft.init_from=target"))


def test_gemma_is_refused():
    config = transformers.Gemma3TextConfig(vocab_size=400)
    with pytest.raises(BadInput, match="Gemma's assistants"):
        METHODS["mtp"].derive(config)
