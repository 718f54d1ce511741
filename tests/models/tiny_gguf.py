"""Tiny random models with a byte-level tokenizer, as GGUF files like those llama.cpp writes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from models.textbook_bpe import alphabet

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
UNMERGED = "zq"  # in the vocabulary, but not reachable by merges
USER_DEFINED = "<tool>"
MERGES = [("1", "2"), ("Ġ", "12"), ("12", "3"), ("h", "i"), ("Ġ", "hi")]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """Control tokens, the 256 bytes in GPT-2's alphabet, the merges, two special cases."""
    merged = [left + right for left, right in MERGES]
    return [*CONTROL, *alphabet().values(), *merged, UNMERGED, USER_DEFINED]


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SIZES,
        vocab_size=len(vocabulary()),
        rms_norm_eps=1e-5,
        rope_theta=20_000.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def tiny_qwen2(seed: int = 0) -> Qwen2ForCausalLM:
    """A model with what is particular to Qwen2: biases at q, k and v. Its head is untied, as in
    files whose head is quantized at a higher precision."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        **SIZES,
        vocab_size=len(vocabulary()),
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # they start as zeros, whose loss no test would notice
            torch.nn.init.normal_(weight, std=0.5)
    return model


def _permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k as llama.cpp stores them: it rotates adjacent pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    pre: str = "smollm",
    add_bos: bool = False,
    source: str = "",
) -> Path:
    config = model.config
    qwen2 = config.model_type == "qwen2"
    writer = GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    if source:
        writer.add_source_repo_url(source)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1_000_000.0 if qwen2 else 20_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if pre == "sentencepiece":
        _add_sentencepiece(writer)
    else:
        _add_byte_level(writer, pre)
    writer.add_bos_token_id(0 if qwen2 else 1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0 if qwen2 else 2)
    if not qwen2:
        writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in _tensors(model).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_byte_level(writer: GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    kinds = {**dict.fromkeys(CONTROL, 3), USER_DEFINED: 4}
    writer.add_token_types([kinds.get(token, 1) for token in vocabulary()])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])


def _add_sentencepiece(writer: GGUFWriter) -> None:
    """As many tokens as the byte-level vocabulary, so that the same model fits."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "i", "hi", "▁hi", *(f"x{i}" for i in range(len(vocabulary())))]
    tokens = [*tokens, *words][: len(vocabulary())]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    for index, layer in enumerate(model.model.layers):
        tensors |= {
            f"blk.{index}.attn_q.weight": layer.self_attn.q_proj.weight,
            f"blk.{index}.attn_k.weight": layer.self_attn.k_proj.weight,
            f"blk.{index}.attn_v.weight": layer.self_attn.v_proj.weight,
            f"blk.{index}.attn_output.weight": layer.self_attn.o_proj.weight,
            f"blk.{index}.ffn_gate.weight": layer.mlp.gate_proj.weight,
            f"blk.{index}.ffn_up.weight": layer.mlp.up_proj.weight,
            f"blk.{index}.ffn_down.weight": layer.mlp.down_proj.weight,
            f"blk.{index}.attn_norm.weight": layer.input_layernorm.weight,
            f"blk.{index}.ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
        for name in "qkv" if config.model_type == "qwen2" else "":
            projection = getattr(layer.self_attn, f"{name}_proj")
            tensors[f"blk.{index}.attn_{name}.bias"] = projection.bias
    if not config.tie_word_embeddings:
        tensors["output.weight"] = model.lm_head.weight
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    for name in arrays if config.model_type == "llama" else ():
        if "attn_q." in name:
            arrays[name] = _permuted(arrays[name], config.num_attention_heads)
        elif "attn_k." in name:
            arrays[name] = _permuted(arrays[name], config.num_key_value_heads)
    return arrays
