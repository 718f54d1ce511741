"""The types of the tables in `formats`: a tensor, a config key, a layout on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# required: without it the engine fails or, worse, serves noise. optional: not needed; read by the
# engine or by trainers if present. ignored: the engine uses the target's. forbidden: misread.
Need = Literal["required", "optional", "forbidden", "ignored"]
# Properties that only some drafts have; "" is for what all drafts have.
Feature = Literal[
    "", "parallel drafting", "several layers", "fc_norm", "norm_output", "small vocabulary",
    "trained embeddings", "chosen aux layers", "last layer", "other width", "scaled rotary",
    "partial rotary", "yarn attention factor", "fc bias",
    "attention bias", "mlp bias", "q/k norms",
    "blocks", "causal blocks", "sliding layers", "reduced head", "confidence head",
]  # fmt: skip


# --- tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorRule:
    """One tensor: our name, its name in the file, its shape, and when it is there."""

    ours: str  # {n}: number of a layer, {a}: number of an aux state
    theirs: str
    shape: tuple[str, ...]  # sums of products of sizes (docs/semantics.md, section 18)
    need: Need = "required"
    feature: Feature = ""  # only drafts with this feature have it
    zeros: bool = False  # drafts without the tensor are written with zeros
    deep: bool = False  # in every layer but the first


def layer_rules(
    ours: str, theirs: str, *, norms: Mapping[str, str], fused: bool = False, deep: bool = False
) -> list[TensorRule]:
    """The tensors of one decoder layer, or of all deep ones; `norms` maps our norms to theirs."""
    width = "2*E" if fused else "E"
    shapes: dict[str, tuple[str, ...]] = {
        "self_attn.q_proj": ("H*C", width),
        "self_attn.k_proj": ("G*C", width),
        "self_attn.v_proj": ("G*C", width),
        "self_attn.o_proj": ("E", "H*C"),
        "mlp.gate_proj": ("I", "E"),
        "mlp.up_proj": ("I", "E"),
        "mlp.down_proj": ("E", "I"),
        **dict.fromkeys(norms, ("E",)),
    }
    weights = [
        TensorRule(f"{ours}.{name}.weight", f"{theirs}.{norms.get(name, name)}.weight", shape)
        for name, shape in shapes.items()
    ]
    biases: list[TensorRule] = []
    for name, shape in shapes.items():
        feature: Feature = "attention bias" if name.startswith("self_attn.") else "mlp bias"
        if len(shape) == 2:
            names = (f"{ours}.{name}.bias", f"{theirs}.{name}.bias")
            biases.append(TensorRule(*names, shape[:1], feature=feature))
    head_norms = [
        TensorRule(f"{ours}.{name}.weight", f"{theirs}.{name}.weight", ("C",), feature="q/k norms")
        for name in ("self_attn.q_norm", "self_attn.k_norm")
    ]
    return [replace(rule, deep=deep) for rule in (*weights, *biases, *head_norms)]


DEEP_NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}


# --- config keys -------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyRule:
    """One key of config.json: a dotted path, and the fact (see `draft_facts`) that it holds."""

    theirs: str
    fact: str = ""  # "": it holds `value`, for every draft
    value: Any = None
    need: Need = "required"
    feature: Feature = ""


_LLAMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "vocab_size", "rope_theta", "rope_parameters", "initializer_range", "torch_dtype",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def fact_keys(*names: str, prefix: str = "", need: Need = "required") -> list[KeyRule]:
    """Keys with the same names as their facts."""
    return [KeyRule(prefix + name, name, need=need) for name in names]


def llama_keys(prefix: str = "", *, model_type: str = "llama") -> list[KeyRule]:
    return [
        KeyRule(f"{prefix}model_type", value=model_type),
        *fact_keys(*_LLAMA, prefix=prefix),
        KeyRule(f"{prefix}rope_scaling", "rope_scaling", feature="scaled rotary"),
        *fact_keys(*_TOKENS, prefix=prefix, need="optional"),
        *fact_keys("attention_bias", "mlp_bias", prefix=prefix),
        KeyRule(f"{prefix}tie_word_embeddings", value=False),
    ]


def speculators_keys(kind: str, title: str, layers: list[KeyRule]) -> list[KeyRule]:
    """The keys that speculators writes for any draft; `layers` are the transformer's."""
    greedy = "speculators_config.proposal_methods.0"
    return [
        KeyRule("model_type", need="forbidden"),
        KeyRule("architectures", value=[title]),
        KeyRule("speculators_model_type", value=kind),
        KeyRule("speculators_version", value="0.9.0"),
        KeyRule("speculators_config.algorithm", value=kind),
        KeyRule("speculators_config.default_proposal_method", value="greedy"),
        KeyRule(f"{greedy}.proposal_type", value="greedy"),
        KeyRule(f"{greedy}.speculative_tokens", "num_draft_tokens"),
        KeyRule(f"{greedy}.verifier_accept_k", value=1),
        KeyRule(f"{greedy}.accept_tolerance", value=0.0),
        KeyRule("speculators_config.verifier.name_or_path", "target"),
        KeyRule("speculators_config.verifier.architectures", "target_architectures"),
        *layers,
    ]


# --- layouts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One layout on disk: its tensors and its config keys."""

    name: str
    tensors: tuple[TensorRule, ...]
    keys: tuple[KeyRule, ...]
    aux_ids_key: str  # path of the aux layers; "": not written, the engine fixes them
    aux_id_offset: int = 0  # id in the file = index of the layer whose output it is + this
    always_aux_ids: bool = False  # written even if they are the engine's default

    @property
    def ignored(self) -> set[str]:
        """Our names of the tensors that the engine takes from the target."""
        return {rule.ours for rule in self.tensors if rule.need == "ignored"}
