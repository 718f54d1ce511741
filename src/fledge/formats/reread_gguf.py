"""Read a draft's GGUF file as llama.cpp does: without `gguf_layout.py`, whose errors must show.

The gguf package parses the container and unpacks blocks; names, keys and orders are stated here a
second time.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.methods.shared.rotary import rotary_frequencies

_CONFIG = {
    "vocab_size": "vocab_size", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}  # fmt: skip
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj",
              "attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}  # fmt: skip
_REST = {"attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm",
         "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
_TOP = {"fc": "fc", "output_norm": "norm", "enc.output_norm": "hidden_norm", "output": "lm_head",
        "token_embd": "embed_tokens", "markov_w1": "markov_head.markov_w1",
        "markov_w2": "markov_head.markov_w2", "conf_proj": "confidence_head.proj"}  # fmt: skip


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Our config's values, our tensors, and the names that the engine does not know."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    kind = facts["general.architecture"]
    _require(kind in ("eagle3", "dflash"), "general.architecture")
    own = {k.removeprefix(f"{kind}."): v for k, v in facts.items() if k.startswith(f"{kind}.")}
    values = {ours: own[theirs] for ours, theirs in _CONFIG.items()}
    _require(own["attention.value_length"] == values["head_dim"], "attention.value_length")
    _require(own["rope.dimension_count"] == values["head_dim"], "rope.dimension_count")
    tokens = facts["tokenizer.ggml.tokens"]
    _require(len(tokens) == values["vocab_size"], "tokenizer.ggml.tokens")
    listened = [i - 1 for i in own["target_layers"]]  # ids of layer inputs
    state, unread, factors_C = {}, [], None
    for tensor in reader.tensors:
        ours = _our_name(tensor.name)
        if tensor.name == "rope_freqs.weight" and kind == "eagle3":
            factors_C = torch.from_numpy(tensor.data.copy())
        elif ours is None:
            unread.append(tensor.name)
        else:
            state[ours] = _values(tensor)
    dtype = state["fc.weight"].dtype
    state = {
        name: t.to(dtype) if t.ndim == 1 and t.is_floating_point() else t
        for name, t in state.items()
    }
    if kind == "eagle3":
        _require(len(listened) == 3, "target_layers")
        _require(values["num_hidden_layers"] == 1, "block_count")
        _require(own.get("norm_before_residual", False) is False, "norm_before_residual")
        _require(own.get("norm_before_fc", False) is False, "norm_before_fc")
        values["target_hidden_size"] = own["target_hidden_size"]
        for name in ("q_proj", "k_proj"):
            key = f"layers.0.self_attn.{name}.weight"
            state[key] = _halves(state[key], values["head_dim"])
    else:
        values |= _block_values(own, facts, state)
    if "d2t" in state:
        _add_vocabulary(state, values["vocab_size"])
        values["draft_vocab_size"] = len(state["d2t"])
    values |= {
        "aux_layer_ids": listened,
        "num_aux_hidden_states": len(listened),
        "rms_norm_eps": _short(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rotary(own, factors_C, values["head_dim"]),
    }
    return values, state, unread


def _block_values(own: dict[str, Any], facts: dict[str, Any], state: dict[str, Tensor]) -> Any:
    heads = "markov_head.markov_w1.weight" in state
    if heads and not bool(state["confidence_head.proj.weight"].any()):
        for name in ("weight", "bias"):
            del state[f"confidence_head.proj.{name}"]
    return {
        "block_size": own["block_size"],
        "mask_token_id": facts["tokenizer.ggml.mask_token_id"],
        "sample_from_anchor": own.get("sample_from_anchor", heads),
        "markov_rank": state["markov_head.markov_w1.weight"].shape[1] if heads else 0,
        "confidence_head": "confidence_head.proj.weight" in state,
        "qk_norm": True,
        "causal": False,
        "sliding_layers": [],
    }


def _our_name(name: str) -> str | None:
    if name == "d2t":
        return "d2t"
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("blk."):
        return None if stem not in _TOP else f"{_TOP[stem]}.{suffix}"
    _, layer, part = stem.split(".", 2)
    if part in _ATTENTION:
        return f"layers.{layer}.self_attn.{_ATTENTION[part]}.{suffix}"
    return f"layers.{layer}.{_REST[part]}.{suffix}" if part in _REST else None


def _values(tensor: Any) -> Tensor:
    from gguf import GGMLQuantizationType, quants

    kind = tensor.tensor_type
    if kind == GGMLQuantizationType.BF16:
        shape = list(reversed(tensor.shape.tolist()))
        return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
    plain = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.I64)
    if kind in plain:
        return torch.from_numpy(tensor.data.copy())
    return torch.from_numpy(quants.dequantize(tensor.data, kind))


def _halves(weight_RX: Tensor, head_dim: int) -> Tensor:
    """Rows of neighbouring rotary pairs, back to one half of each head after the other."""
    heads = weight_RX.reshape(-1, head_dim // 2, 2, weight_RX.shape[-1])
    return torch.cat([heads[:, :, 0], heads[:, :, 1]], dim=1).reshape(weight_RX.shape)


def _add_vocabulary(state: dict[str, Tensor], vocab_size: int) -> None:
    ids = state["d2t"]
    _require(bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab_size), "d2t")
    state["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
    state["t2d"][ids] = True
    state["d2t"] = ids - torch.arange(len(ids))


def _rotary(own: dict[str, Any], factors_C: Tensor | None, head_dim: int) -> dict[str, Any]:
    rope = {"rope_type": own.get("rope.scaling.type", "default")}
    rope["rope_theta"] = _short(own["rope.freq_base"])
    if rope["rope_type"] != "default":
        rope["factor"] = _short(own["rope.scaling.factor"])
        if rope["rope_type"] == "yarn":
            key = "original_max_position_embeddings"
            rope[key] = own["rope.scaling.original_context_length"]
            for name in ("beta_fast", "beta_slow"):
                if (stored := own.get(f"rope.scaling.yarn_{name}")) is not None:
                    rope[name] = _short(stored)
    if factors_C is not None:
        stated = json.loads(own["rope.fledge"])
        config = LlamaConfig(rope_parameters=stated, head_dim=head_dim)
        exponent_C = torch.arange(0, head_dim, 2) / head_dim
        divided_C = rope["rope_theta"] ** -exponent_C / factors_C
        same = torch.allclose(divided_C, rotary_frequencies(config)[0], rtol=1e-5, atol=0)
        _require(rope["rope_type"] == "default" and same, "rope_freqs.weight")
        return dict(stated)
    return rope


def _short(value: float) -> float:
    """Floats are stored in single precision: 9.999999747378752e-06 stands for 1e-05."""
    return float(f"{value:.7g}")


def _require(holds: bool, key: str) -> None:
    if not holds:
        raise BadInput(f"self-check: {key} is not what the engine must read", where=key)
