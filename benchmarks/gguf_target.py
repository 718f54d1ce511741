"""A Llama as a GGUF file in one type of numbers. In float32, llama.cpp computes what torch does."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fledge.formats.gguf_tokenizer import tokenizer_keys
from fledge.models.resolve import local_model

LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm"}


def target_gguf(name: str, path: Path, dtype: str = "f32") -> Path:
    """`dtype` is that of the matrices: f32, f16, bf16 or q8_0."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    directory = local_model(name)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    size = config["head_dim"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config["vocab_size"])
    for key, value in tokenizer_keys(name, config["vocab_size"]).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for ours, tensor in load_file(directory / "model.safetensors").items():
        stem = ours.removeprefix("model.").removesuffix(".weight")
        if stem.startswith("layers."):
            _, index, part = stem.split(".", 2)
            theirs = f"blk.{index}.{LAYER[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):  # rotary pairs are neighbours
                halves = tensor.unflatten(0, (-1, 2, size // 2))
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        else:
            theirs = OUTSIDE.get(stem, "output")
        values = tensor.float().contiguous().numpy()
        if tensor.ndim == 1 or dtype == "f32":
            writer.add_tensor(f"{theirs}.weight", values)
        else:
            kind = GGMLQuantizationType[dtype.upper()]
            writer.add_tensor(f"{theirs}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
