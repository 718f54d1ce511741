"""Writes a healthy draft of ours in the layouts of other trainers."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from export.drafts import files_of

_OURS = ("aux_layer_ids", "parallel_drafting", "num_aux_hidden_states")  # keys only fledge writes


def _config(ours: dict, *, drop=(), **changed) -> dict:
    kept = {k: v for k, v in ours.items() if k not in (*_OURS, *drop)}
    return {**kept, **changed}


def _midlayer(tensors: dict) -> dict:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def as_eagle(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """SafeAILab: midlayer, torch's own file, no embeddings, the target's architecture."""
    kept = {k: v for k, v in _midlayer(tensors).items() if k != "embed_tokens.weight"}
    torch.save(kept, out / "pytorch_model.bin")
    _write(out, _config(config, architectures=["LlamaForCausalLM"]))


def as_specforge(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """SpecForge: midlayer, no embeddings; P-EAGLE drafts have a separate class."""
    kept = {k: v for k, v in tensors.items() if k != "embed_tokens.weight"}
    name = "LlamaForCausalLMEagle3"
    if "mask_hidden" in tensors:
        name, kept = "PEagleDraftModel", dict(tensors)
    else:
        kept = _midlayer(kept)
    save_file(kept, out / "model.safetensors")
    _write(out, _config(config, architectures=[name]))


def as_speculators(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """speculators: the Llama config is nested; layers are counted as in vLLM."""
    kind = "peagle" if "mask_hidden" in tensors else "eagle3"
    top = ("draft_vocab_size", "fc_norm", "norm_output", "mask_token_id", "target_hidden_size")
    outer = {key: config[key] for key in top if config.get(key) is not None}
    outer |= {
        "speculators_model_type": kind,
        "architectures": ["Eagle3DraftModel"],
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config["aux_layer_ids"]],
        "transformer_layer_config": _config(config, drop=top),
    }
    save_file(tensors, out / "model.safetensors")
    _write(out, outer)


def as_automodel(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """NeMo AutoModel: the backbone under `model.`, in two shards."""
    bare = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
    names = {name: name if name in bare else f"model.{name}" for name in tensors}
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": list(names)[:half],
             "model-00002-of-00002.safetensors": list(names)[half:]}  # fmt: skip
    for part, part_names in parts.items():
        save_file({names[name]: tensors[name] for name in part_names}, out / part)
    index = {names[name]: part for part, part_names in parts.items() for name in part_names}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    extra = {"parallel_drafting": True} if "mask_hidden" in tensors else {}
    _write(out, _config(config, architectures=["LlamaEagle3DraftModel"], **extra))


def as_modelopt(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """ModelOpt: plain names, no embeddings, no t2d; layer ids in `eagle_config`, as in fledge."""
    kept = {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "t2d")}
    save_file(kept, out / "model.safetensors")
    eagle = {
        "eagle_aux_hidden_state_layer_ids": config["aux_layer_ids"],
        "use_aux_hidden_state": True,
        "next_layer_regular": True,
    }
    _write(out, _config(config, eagle_config=eagle))


# --- EAGLE-1 -------------------------------------------------------------------------------------

_OURS_OF_1 = (
    "eagle_version", "fc_bias", "draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output",
    "norm_before_residual", "mask_token_id",
)  # fmt: skip


def as_eagle1(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """SafeAILab: torch's own file with the target's embeddings; the target's config with one layer
    and a flag for the bias of fc."""
    kept = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    torch.save(kept, out / "pytorch_model.bin")
    values = _config(config, drop=_OURS_OF_1, architectures=["LlamaForCausalLM"])
    _write(out, values | {"bias": "fc.bias" in tensors})


def as_eagle1_vllm(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """vLLM: the name of its class, and only the tensors that it has."""
    kept = {k: v for k, v in tensors.items() if k not in ("lm_head.weight", "embed_tokens.weight")}
    save_file(kept, out / "model.safetensors")
    _write(out, _config(config, drop=_OURS_OF_1, architectures=["EagleLlamaForCausalLM"]))


def as_eagle1_sglang(config: dict, tensors: dict, out: Path, target: Path) -> None:
    """SGLang: its class, whose fc always has a bias (maybe zeros). Often includes embeddings."""
    kept = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    kept.setdefault("fc.bias", tensors["fc.weight"].new_zeros(len(tensors["fc.weight"])))
    save_file(kept, out / "model.safetensors")
    _write(out, _config(config, drop=_OURS_OF_1, architectures=["LlamaForCausalLMEagle"]))


def _write(out: Path, config: dict) -> None:
    (out / "config.json").write_text(json.dumps(config))


LAYOUTS = {
    "eagle": as_eagle,
    "specforge": as_specforge,
    "speculators": as_speculators,
    "automodel": as_automodel,
    "modelopt": as_modelopt,
}

EAGLE1_LAYOUTS = {
    "eagle": as_eagle1,
    "eagle1-vllm": as_eagle1_vllm,
    "eagle1-sglang": as_eagle1_sglang,
}


def write_as(layout: str, ours: Path, out: Path, target: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config, tensors = files_of(ours)
    layouts = EAGLE1_LAYOUTS if "eagle_version" in config else LAYOUTS
    layouts[layout](config, tensors, out, target)
    return out
