"""The native multi-token heads that models ship: what each family computes, and its names in files.

A head reads `W [norm_e(embedding of token t + 1) ; norm_h(the target's state at t)]`, then has one
decoder layer of the target's own kind and a norm; the target's head reads that. What differs from
family to family is said here and nowhere else: training, decoding, export and diagnose read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fledge.core.errors import BadInput


@dataclass(frozen=True)
class Family:
    """One way to write a head. Our own files name its tensors alike and store W as [e ; h]."""

    name: str
    title: str
    prefix: str  # of its tensors in a target's files; {layers}: the target's layers
    layer_prefix: str  # of the tensors of its layer
    names: Mapping[str, str]  # our name -> that in the files; those of the layer are alike
    count_key: str  # of the target's config: how many heads there are
    states_first: bool = False  # W reads [h ; e]
    blank_start: bool = False  # at position 0 the embedding is read as zeros
    gain: float = 0.0  # a norm multiplies by this plus its weight
    # model_type of a target's text config -> its decoder layer in transformers, which the head has
    layers: Mapping[str, str] = field(default_factory=dict)


MIMO = Family(
    "mimo",
    "MiMo",
    prefix="model.mtp_layers.0.",
    layer_prefix="model.mtp_layers.0.",
    names={
        "fc.weight": "input_proj.weight",
        "embedding_norm.weight": "token_layernorm.weight",
        "hidden_norm.weight": "hidden_layernorm.weight",
        "norm.weight": "final_layernorm.weight",
    },
    count_key="num_nextn_predict_layers",
    states_first=True,
    blank_start=True,
)
DEEPSEEK = Family(
    "deepseek",
    "DeepSeek and GLM",
    prefix="model.layers.{layers}.",
    layer_prefix="model.layers.{layers}.",
    names={
        "fc.weight": "eh_proj.weight",
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "norm.weight": "shared_head.norm.weight",
    },
    count_key="num_nextn_predict_layers",
    blank_start=True,
    layers={
        "deepseek_v3": "deepseek_v3.modeling_deepseek_v3:DeepseekV3DecoderLayer",
        "glm4_moe": "glm4_moe.modeling_glm4_moe:Glm4MoeDecoderLayer",
    },
)
QWEN = Family(
    "qwen",
    "Qwen3-Next and Qwen3.5",
    prefix="mtp.",
    layer_prefix="mtp.layers.0.",
    names={
        "fc.weight": "fc.weight",
        "embedding_norm.weight": "pre_fc_norm_embedding.weight",
        "hidden_norm.weight": "pre_fc_norm_hidden.weight",
        "norm.weight": "norm.weight",
    },
    count_key="mtp_num_hidden_layers",
    gain=1.0,
    layers={
        "qwen3_next": "qwen3_next.modeling_qwen3_next:Qwen3NextDecoderLayer",
        "qwen3_5_text": "qwen3_5.modeling_qwen3_5:Qwen3_5DecoderLayer",
        "qwen3_5_moe_text": "qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeDecoderLayer",
    },
)
FAMILIES = {family.name: family for family in (MIMO, DEEPSEEK, QWEN)}

# The engines that hand over the last layer's output, before the target's final norm, and for which
# targets. All others hand over the state after it.
BEFORE_THE_NORM = {"vllm": ("MiMoForCausalLM",)}


def served_layer(engine: str, architectures: Sequence[str], depth: int) -> int:
    """The layer, in the sense of `aux_layer_ids`, whose state an engine hands to a head."""
    return depth - 1 if {*architectures} & {*BEFORE_THE_NORM.get(engine, ())} else depth


def family_of(text_config: Any) -> Family:
    """The family of heads for a target: its own, else MiMo's, which engines build beside any dense
    model with layers like Llama's."""
    kind = text_config.model_type
    for family in FAMILIES.values():
        if kind in family.layers:
            return family
    if kind.startswith("gemma"):
        what = (
            "Gemma's assistants read the keys and values of their target, which drafts here do not"
        )
    elif (getattr(text_config, "hidden_act", None) or "silu") != "silu" or hasattr(
        text_config, "num_experts"
    ):
        what = "engines build such a head beside a dense model with SwiGLU layers only"
    else:
        return MIMO
    raise BadInput(what, where=f"objective.kind=mtp with a {kind}", fix="objective.kind=eagle3")
