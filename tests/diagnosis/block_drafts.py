"""Block drafts fitted to the tiny target of the diagnosis tests, in any trainer's layout."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from export.drafts import answered_rows, descend, files_of
from fledge.methods.base import TrainerInputs
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.registry import method_of
from fledge.methods.shared.config import derive_draft_config
from fledge.target.hf.model import HFEagle3TargetModel

LAYERS, MASK = [1, 3, 5], 4
_SPARK = {"sample_from_anchor": True, "markov_rank": 16, "confidence_head": True}


def make_block(target: Path, kind: str) -> BlockDraftModel:
    """A fitted draft."""
    backend = HFEagle3TargetModel.from_pretrained(
        target, aux_layer_ids=LAYERS, num_aux_layers=len(LAYERS), device="cpu"
    )
    torch.manual_seed(1)
    values = {"block_size": 5, "mask_token_id": MASK, "num_aux_hidden_states": len(LAYERS)}
    config = derive_draft_config(
        backend.model.config, architecture="LlamaForCausalLM", num_hidden_layers=2, qk_norm=True,
        **values | (_SPARK if kind == "dspark" else {}),
    )  # fmt: skip
    config.aux_layer_ids = list(LAYERS)
    draft = BlockDraftModel(config)
    draft.borrow_from(backend)
    prepare(draft)
    fit_block(draft, backend)
    return draft.eval()


@torch.no_grad()
def prepare(draft: BlockDraftModel) -> None:
    """Start fc as differences of layers and spread the weights, so that faults cost acceptance."""
    for weight in draft.parameters():
        weight.mul_(6 if weight.ndim == 2 else 1)
    size = draft.config.hidden_size
    low, high = torch.randn(2, size, size) * 4 / size**0.5
    draft.fc.weight.copy_(torch.cat([-low, low - high, high], dim=1))
    for layer in draft.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.copy_(1 + 0.5 * torch.rand_like(norm.weight))
    draft.hidden_norm.weight.copy_(torch.rand(size) * 2)


def fit_block(draft, backend, steps=60) -> None:
    full = torch.arange(draft.config.vocab_size)
    inputs = TrainerInputs(full, torch.ones_like(full).bool(), backend.info().head, None)
    method = method_of(draft.config)
    module = method.objective(draft, inputs, **method.bench_options())
    descend(module, draft, backend, answered_rows(backend), steps=steps, seeded=True)


# --- other trainers' layouts, as in their own files ----------------------------------------------

_FLEDGE_ONLY = (
    "aux_layer_ids", "num_aux_hidden_states", "qk_norm", "causal", "sliding_layers", "draft_tokens",
    "confidence_head", "confidence_threshold", "confidence_temperatures", "fc_norm", "norm_output",
    "parallel_drafting", "norm_before_residual", "sliding_window", "sample_from_anchor",
    "draft_vocab_size", "target_hidden_size", "mask_token_id", "markov_rank", "block_size",
    "norm_before_fc",
)  # fmt: skip


def _qwen3(config) -> dict:
    kept = {key: value for key, value in config.items() if key not in _FLEDGE_ONLY}
    kinds = ["full_attention"] * config["num_hidden_layers"]
    return kept | {"model_type": "qwen3", "layer_types": kinds}


def as_zlab(config):
    inner = {"mask_token_id": MASK, "target_layer_ids": LAYERS}
    block = {"block_size": config["block_size"], "num_target_layers": 8, "dflash_config": inner}
    return _qwen3(config) | block | {"architectures": ["DFlashDraftModel"]}


def _heads(config) -> dict:
    return {
        "markov_rank": config["markov_rank"], "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip


def as_deepspec(config):
    block = {"block_size": config["block_size"], "mask_token_id": MASK, "target_layer_ids": LAYERS}
    named = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 8}
    named |= {"sample_from_anchor": True}
    return _qwen3(config) | block | named | _heads(config)


def as_specforge(config):
    inner = {"mask_token_id": MASK, "target_layer_ids": LAYERS, "projector_type": "dflash"}
    if config["markov_rank"]:
        inner |= {"projector_type": "dspark", **_heads(config)}
    block = {"block_size": config["block_size"], "num_target_layers": 8, "dflash_config": inner}
    return _qwen3(config) | block | {"architectures": ["DFlashDraftModel"]}


def as_modelopt(config):
    values = as_specforge(config)
    values["dflash_config"] |= {"causal": False, "shift_label": True, "use_confidence_head": True}
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        del values["dflash_config"][key]
    return values


MODELOPT_NAMES = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}


def as_speculators(config):
    kind = "dspark" if config["markov_rank"] else "dflash"
    size, anchor = config["block_size"], kind == "dspark"
    proposal = {"proposal_type": "greedy", "speculative_tokens": size - (not anchor)}
    values = {
        "speculators_model_type": kind, "architectures": ["Speculator"], "block_size": size,
        "speculators_config": {
            "algorithm": kind, "proposal_methods": [proposal], "verifier": {"name_or_path": "T"},
        },
        "transformer_layer_config": _qwen3(config), "mask_token_id": MASK,
        "draft_vocab_size": config["draft_vocab_size"], "sample_from_anchor": anchor,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS],
    }  # fmt: skip
    return values | (_heads(config) if anchor else {})


LAYOUTS = {
    "dflash": {"dflash": as_zlab, "specforge": as_specforge, "speculators": as_speculators},
    "dspark": {"dspark": as_deepspec, "specforge": as_specforge, "speculators": as_speculators},
}


def write_block_as(layout: str, ours: Path, out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config, tensors = files_of(ours)
    kind = "dspark" if config["markov_rank"] else "dflash"
    (out / "config.json").write_text(json.dumps(LAYOUTS[kind][layout](config)))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out
