"""Shapes of some well-known models, so that runs can be planned before anything is fetched.

The sizes are those of their configs; everything else has the architecture's defaults. Not for
loading: a model that is run has its own config.
"""

from typing import Any

from fledge.core.errors import BadInput
from fledge.models.resolve import load_config

_LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072}
_QWEN3 = {"vocab_size": 151_936, "max_position_embeddings": 40_960}
SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA3
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14_336},
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA3
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28_672},
    "Qwen/Qwen3-8B": _QWEN3
    | {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    | {"intermediate_size": 12_288},
    "Qwen/Qwen3-235B-A22B": _QWEN3
    | {"model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94}
    | {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
    | {"intermediate_size": 12_288, "moe_intermediate_size": 1536}
    | {"num_experts": 128, "num_experts_per_tok": 8},
}


def shape_of(name: str, *, trust_remote_code: bool = False) -> Any:
    """The config of a model, for its sizes: from `SHAPES`, else the model's own."""
    if name in SHAPES:  # first, so that results do not depend on what this machine has fetched
        from transformers import AutoConfig

        sizes = dict(SHAPES[name])
        return AutoConfig.for_model(
            sizes.pop("model_type"), **sizes, tie_word_embeddings=False, dtype="bfloat16"
        )
    try:
        return load_config(name, trust_remote_code=trust_remote_code)
    except BadInput as error:
        names = ", ".join(SHAPES)
        fix = f"name a directory that holds its config.json; known without: {names}"
        raise BadInput(f"the config of '{name}' is not here", where="model", fix=fix) from error
