"""Tiny random models of every architecture that targets are tested on, built in milliseconds."""

from typing import Any

import torch
import transformers

VOCABULARY = 97
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"sliding_window": 4}  # shorter than the rows of the tests, so that it matters
_EXPERTS = {"num_experts_per_tok": 2}


def _causal(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config)


def _gemma3(**options: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **_SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8} | _SLIDING | options
    )


def _gemma3_conditional() -> Any:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    text = _gemma3().to_dict()
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


BUILDERS: dict[str, Any] = {
    "llama": lambda: _causal(transformers.LlamaConfig(**_SMALL)),
    "llama-tied": lambda: _causal(transformers.LlamaConfig(**_SMALL, tie_word_embeddings=True)),
    "mistral": lambda: _causal(transformers.MistralConfig(**_SMALL | _SLIDING, head_dim=8)),
    "qwen2": lambda: _causal(transformers.Qwen2Config(**_SMALL)),
    "qwen3": lambda: _causal(transformers.Qwen3Config(**_SMALL, head_dim=8)),
    "qwen3-moe": lambda: _causal(
        transformers.Qwen3MoeConfig(
            **_SMALL | _EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16
        )
    ),
    "phi3": lambda: _causal(transformers.Phi3Config(**_SMALL)),
    "gemma2": lambda: _causal(
        transformers.Gemma2Config(
            **_SMALL | _SLIDING, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=3.0
        )
    ),
    "gemma3-text": lambda: _causal(_gemma3()),
    "gemma3-conditional": _gemma3_conditional,
    "gpt-oss": lambda: _causal(
        transformers.GptOssConfig(**_SMALL | _SLIDING | _EXPERTS, head_dim=8, num_local_experts=4)
    ),
    "gpt2": lambda: _causal(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=8, n_head=4, n_positions=64
        )
    ),
    "cohere": lambda: _causal(transformers.CohereConfig(**_SMALL, logit_scale=0.0625)),
    "granite": lambda: _causal(transformers.GraniteConfig(**_SMALL, logits_scaling=13.0)),
    "minicpm3": lambda: _causal(
        transformers.MiniCPM3Config(
            **_SMALL | {"num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            dim_model_base=20,  # divides the states before the head
        )
    ),
}
if not hasattr(transformers, "MiniCPM3Config"):  # transformers 4.57 does not have it
    del BUILDERS["minicpm3"]
ARCHITECTURES = sorted(BUILDERS)


def tiny_model(
    name: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """A random model in eval mode, its weights spread so that every part of it matters. `changes`
    override fields of its config."""
    torch.manual_seed(seed)
    model = BUILDERS[name]()
    if changes:
        for key, value in changes.items():
            setattr(model.config, key, value)
        model = type(model)(model.config)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3 if parameter.ndim == 2 else 0.15)
            elif "norm" in key or "ln_" in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.2)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products do not support fp64
    return model


def overflowing(scale: float = 1e30) -> Any:
    """A model whose layer 3 overflows float32, or at a scale of 1e3 only float16."""
    model = tiny_model("llama")
    for projection in (model.model.layers[3].mlp.up_proj, model.model.layers[3].mlp.down_proj):
        projection.weight.data.mul_(scale)
    return model
