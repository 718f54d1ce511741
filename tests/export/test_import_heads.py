"""Drafts with the heads of other trainers, as they write them: imported, they are ours again."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.block_cases import KINDS, make_block
from export.export_cases import config_of
from fledge import import_draft
from fledge.methods.registry import load_draft, method_of

_LAYER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "initializer_range",
)  # fmt: skip


def _flat(config, architecture, **inner):
    kinds = ["full_attention"] * config["num_hidden_layers"]
    return {
        **{key: config[key] for key in _LAYER_KEYS},
        "architectures": [architecture], "model_type": "qwen3", "layer_types": kinds,
        "num_target_layers": 4, "block_size": config["block_size"],
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], **inner},
    }  # fmt: skip


def _automodel(config):
    """0.7.0 writes the class of a plain DFlash, and no direction."""
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank")
    inner = {key: config[key] for key in keys} | {"selector_top_k": config["candidates"]}
    return _flat(config, "Qwen3DFlashDraftModel", **inner)


def _specforge(config):
    inner = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 12, "shift_label": True}
    return _flat(config, "DominoDraftModel", **inner)  # without pure_draft_prefix_len: 0


def _modelopt(config):
    sizes = ("hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim", "vector_eps")
    defaults = {"num_layers": 2, "mlp_ratio": 2, "vector_eps": 1e-4}
    inner = {f"lilicorr_{x}": config.get(f"lilicorr_{x}", defaults.get(x)) for x in sizes}
    inner |= {"lilicorr_enabled": True, "lilicorr_candidate_topk": 4, "lilicorr_logit_scale": 8.0}
    return _flat(config, "LiLiCorrDraftModel", **inner)


MODELOPT_NAMES = {
    r"feature_norm\.": "feature_mlp.0.", r"feature_mlp\.up_proj": "feature_mlp.1",
    r"feature_mlp\.down_proj": "feature_mlp.3", r"(layers\.\d+\.mlp)\.up_proj": r"\1.0",
    r"(layers\.\d+\.mlp)\.down_proj": r"\1.2",
}  # fmt: skip
CASES = {
    "AutoModel's DFlash 2": ("dflash2", _automodel, {}),
    "SpecForge's Domino": ("domino", _specforge, {r"^domino_head\.": ""}),
    "ModelOpt's LiLiCorr": ("lilicorr", _modelopt, MODELOPT_NAMES),
}


def theirs(ours: Path, out: Path, config, renamed) -> Path:
    out.mkdir()
    tensors = load_file(ours / "model.safetensors")
    for pattern, name in renamed.items():
        lattice = re.compile(pattern)
        tensors = {
            lattice.sub(name, key) if not key.startswith("layers.") else key: tensor
            for key, tensor in tensors.items()
        }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(config_of(ours))))
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_head_of_another_trainer_is_imported(name, tiny_target, tmp_path):
    kind, config, renamed = CASES[name]
    changes = {"pure_draft_prefix_len": 0} if kind == "domino" else {}
    ours = make_block(tmp_path / "ours", **KINDS[kind] | changes)
    source = theirs(ours, tmp_path / "theirs", config, renamed)
    import_draft(source, tmp_path / "back", target=str(tiny_target))
    first, back = load_draft(ours), load_draft(tmp_path / "back")
    assert method_of(back.config).name == kind
    assert back.spec == first.spec
    state = back.state_dict()
    assert state.keys() == first.state_dict().keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in first.state_dict().items())
