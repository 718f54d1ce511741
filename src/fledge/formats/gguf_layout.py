"""A draft as one GGUF file, which llama.cpp serves: keys, names of tensors, and the writer.

Shares no table with `reread_gguf.py`, which reads the file back. What a file holds, and which
drafts it cannot hold: docs/llamacpp.md. The keys of DFlash and DSpark are in
`methods/block/formats.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fledge.formats.codec import Facts, Format, PlainDraft, taken
from fledge.formats.quantise import encoded, file_type
from fledge.methods.shared.rotary import rope_parameters, rotary_frequencies

DRAFT_NAME = "draft.gguf"
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "norm": "output_norm", "hidden_norm": "enc.output_norm", "lm_head": "output",
    "embed_tokens": "token_embd", "markov_head.markov_w": "markov_w",
    "confidence_head.proj": "conf_proj",
}  # fmt: skip
RENAMED = {
    **{rf"^layers\.(\d+)\.{ours}\.": rf"blk.\1.{theirs}." for ours, theirs in _LAYER.items()},
    **{rf"^{ours}(?=\.|\d)": theirs for ours, theirs in _OUTSIDE.items()},
}


@dataclass(frozen=True)
class GgufFormat(Format):
    """Keys of `config` get the architecture's prefix. Neither embeddings nor t2d are written; if
    the embeddings are the draft's own, the export takes them off `ignored`."""

    architecture: str = ""
    pairs_channels: bool = False  # rotary pairs are neighbours: rows of q and k are reordered


def rotary_keys(facts: Facts) -> dict[str, Any]:
    rope = facts["rope_parameters"]
    keys = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": facts["head_dim"]}
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"]}
        keys |= {"rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys |= {
            f"rope.scaling.yarn_{name}": float(rope[name])
            for name in ("beta_fast", "beta_slow")
            if rope.get(name) is not None
        }
    if rope["rope_type"] == "llama3":  # ours: the file has only the resulting factors
        keys["rope.fledge"] = json.dumps(rope)
    return keys


def layer_keys(facts: Facts) -> dict[str, Any]:
    """The keys that every architecture has."""
    return {
        "context_length": facts["max_position_embeddings"],
        "embedding_length": facts["hidden_size"],
        "block_count": facts["num_hidden_layers"],
        "feed_forward_length": facts["intermediate_size"],
        "attention.head_count": facts["num_attention_heads"],
        "attention.head_count_kv": facts["num_key_value_heads"],
        "attention.key_length": facts["head_dim"],
        "attention.value_length": facts["head_dim"],
        "attention.layer_norm_rms_epsilon": float(facts["rms_norm_eps"]),
        **taken(facts, "vocab_size"),
        **rotary_keys(facts),
    }


def _eagle3_keys(facts: Facts) -> dict[str, Any]:
    own = {"norm_before_residual": False, "norm_before_fc": False}
    return {**layer_keys(facts), **taken(facts, "target_hidden_size"), **own}


EAGLE3_GGUF = GgufFormat(
    "gguf-eagle3", _eagle3_keys, "target_layers", aux_id_offset=1, always_aux_ids=True,
    ignored=frozenset({"embed_tokens.weight"}), renamed=RENAMED, architecture="eagle3",
    pairs_channels=True,
)  # fmt: skip


def gguf_tensors(layout: GgufFormat, draft: PlainDraft) -> dict[str, Tensor]:
    """The tensors by their names in the file; `d2t` holds target ids there, not offsets."""
    config, tensors = draft.config, {}
    for name, tensor in draft.tensors.items():
        if name in layout.ignored or name == "t2d":
            continue
        if name == "d2t":
            tensor = tensor + torch.arange(len(tensor))
        if layout.pairs_channels and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _paired(tensor, config.head_dim)
        tensors[layout.tensor_name(name)] = tensor.detach().cpu()
    if rope_parameters(config)["rope_type"] == "llama3":  # has no keys, but a table of factors
        tensors["rope_freqs.weight"] = _frequency_factors(config)
    if "markov_w1.weight" in tensors and "conf_proj.weight" not in tensors:
        # required: these say that every token is certain, so that nothing is cut
        width = config.hidden_size + config.markov_rank
        tensors["conf_proj.weight"] = torch.zeros(1, width)
        tensors["conf_proj.bias"] = torch.full((1,), 30.0)
    return tensors


def _paired(weight_RX: Tensor, head_dim: int) -> Tensor:
    """The rows of each head with channels i and i + half side by side."""
    heads_H2CX = weight_RX.reshape(-1, 2, head_dim // 2, weight_RX.shape[1])
    return heads_H2CX.transpose(1, 2).reshape(weight_RX.shape)


def _frequency_factors(config: PretrainedConfig) -> Tensor:
    """By what the plain angle of each pair of channels is divided."""
    scaled_C, _ = rotary_frequencies(config)
    exponent_C = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain_C: Tensor = (
        torch.tensor(float(rope_parameters(config)["rope_theta"])).double() ** -exponent_C
    )
    return (plain_C / scaled_C.double()).float()


def write_gguf(
    path: Path,
    layout: GgufFormat,
    draft: PlainDraft,
    keys: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    *,
    name: str,
    types: Mapping[str, str],  # of quantised tensors, by our name
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, layout.architecture)
    writer.add_string("general.name", name)
    writer.add_file_type(file_type(types, draft.dtype))
    writer.add_quantization_version(2)
    for key, value in keys.items():
        whole = key.startswith("tokenizer.")
        _add(writer, key if whole else f"{layout.architecture}.{key}", value)
    for key, value in tokenizer.items():
        if key not in keys:
            _add(writer, key, value)
    by_name = {layout.tensor_name(ours): kind for ours, kind in types.items()}
    for their_name, tensor in gguf_tensors(layout, draft).items():
        blocks = encoded(tensor, by_name.get(their_name, ""))
        writer.add_tensor(their_name, blocks.data, raw_dtype=blocks.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
