"""Drafts of every kind for a tiny target on disk: random, but with peaked predictions."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from export.block_cases import KINDS as BLOCKS
from fledge.formats.self_check import CheckOptions
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel

AUX = [0, 1, 3]  # three of the four layers of the tiny target, the last one among them
INNER = [0, 1, 2]
KINDS = {
    "eagle3": {},
    "full vocabulary": {"draft_vocab_size": None},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2},
    "peagle": {"parallel_drafting": True, "mask_token_id": 0, "num_hidden_layers": 2},
}
VLLM_ONLY = {
    "q/k norms": {"qk_norm": True, "num_hidden_layers": 2},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
}
# what engines would misread is refused
REFUSED = {
    ("peagle", "sglang"): "--engine vllm serves P-EAGLE",
    **{(kind, engine): "cannot serve a draft with .*--engine vllm"
       for kind in VLLM_ONLY for engine in ("sglang", "speculators")},
    ("dflash, small vocabulary", "sglang"): "reduced head",
    ("dspark, small vocabulary", "sglang"): "reduced head",
    ("dflash, causal", "speculators"): "causal blocks",
    ("dflash, sliding", "speculators"): "sliding layers",
    ("dflash2, windows both ways", "speculators"): "sliding layers",
    ("lilicorr", "speculators"): "does not read",
    ("lilicorr with convolutions", "speculators"): "does not read",
    ("domino", "vllm"): "does not read",
    ("domino", "speculators"): "does not read",
}  # fmt: skip
ENGINES = ("vllm", "sglang", "speculators")
EVERY = [(kind, engine) for kind in (*KINDS, *VLLM_ONLY, *BLOCKS) for engine in ENGINES]
SERVED = [case for case in EVERY if case not in REFUSED]
CHECK = CheckOptions(limit=2, max_new_tokens=12)


def make_draft(directory, target=None, *, seed=0, aux_layer_ids=INNER, **options) -> Path:
    """Write a random draft; given a target's directory, the draft has that target's embeddings."""
    torch.manual_seed(seed)
    width = options.pop("draft_vocab_size", 90)
    values = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "rms_norm_eps": 1e-6,
        "draft_vocab_size": width or 400, "aux_layer_ids": list(aux_layer_ids),
    }  # fmt: skip
    draft = LlamaEagle3DraftModel(LlamaConfig(**values | options))
    if width:
        ids = torch.randperm(400)[:width].sort().values
        mask = torch.zeros(400, dtype=torch.bool)
        mask[ids] = True
        draft.set_vocab_mapping(ids, mask)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
        if target is not None:
            model = AutoModelForCausalLM.from_pretrained(target)
            draft.copy_embeddings_from_target(model.get_input_embeddings())
    draft.save_pretrained(directory)
    return Path(directory)


def config_of(directory) -> dict:
    return json.loads((Path(directory) / "config.json").read_text())


def tensors_of(directory) -> dict:
    return load_file(Path(directory) / "model.safetensors")


def rewrite(directory, *, config=None, tensors=None) -> None:
    """Break an export: `config` and `tensors` are functions that change their argument in place."""
    if config is not None:
        values = config_of(directory)
        config(values)
        (directory / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        state = tensors_of(directory)
        tensors(state)
        save_file(state, directory / "model.safetensors")
