"""What each engine reads from a draft, as tables: tensors and config keys (`engines`: versions).

The writer follows these tables; `diagnose` and `import` use them too. Nothing here opens a file or
imports torch. The facts come from running the engines (docs/formats.md explains them,
docs/export.md lists versions and tests).

    plain-vllm           layers.N.*, config.json of a Llama                        vLLM
    plain-sglang         midlayer.* (and layers.N.*), config.json of a Llama       SGLang
    speculators-eagle3   layers.N.*, the nested config of the speculators package  vLLM, speculators
    speculators-peagle   the same for P-EAGLE
    eagle1-vllm          layers.N.*, config.json of a Llama; the target's embeddings and head
    eagle1-sglang        the same with a bias of fc, which SGLang's class has
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, Literal

# required: without it the engine fails or, worse, serves noise. optional: not needed; read by the
# engine or by trainers when there. ignored: the engine takes the target's. forbidden: misread.
Need = Literal["required", "optional", "forbidden", "ignored"]
# What a draft has that not every draft has; "" is what all have.
Feature = Literal[
    "", "parallel drafting", "several layers", "fc_norm", "norm_output", "small vocabulary",
    "trained embeddings", "chosen aux layers", "last layer", "other width", "scaled rotary",
    "partial rotary", "yarn attention factor", "fc bias",
    "attention bias", "mlp bias", "q/k norms",
]  # fmt: skip

CARD_NAME = "README.md"
RECORD_NAME = "fledge_export.json"  # where an export came from and what was measured on it


# --- tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorRule:
    """One tensor: our name, theirs, its shape, and when it is in the file."""

    ours: str  # {n}: number of a layer, {a}: number of an aux state
    theirs: str
    shape: tuple[str, ...]  # products of sizes, by their letters in docs/semantics.md, section 18
    need: Need = "required"
    feature: Feature = ""  # only drafts with this feature have it
    zeros: bool = False  # drafts without the tensor are written with zeros
    deep: bool = False  # of every layer but the first


def _layer(
    ours: str, theirs: str, *, norms: Mapping[str, str], fused: bool = False, deep: bool = False
) -> list[TensorRule]:
    """One decoder layer, or all deep ones; `norms` maps our norms to theirs."""
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


_DEEP_NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
_FIRST_NORMS = {**_DEEP_NORMS, "hidden_norm": "hidden_norm"}
# SGLang's deeper layers norm their input with what they call hidden_norm.
_SGLANG_DEEP_NORMS = {**_DEEP_NORMS, "input_layernorm": "hidden_norm"}


def _tensors(
    first: str, deep_norms: Mapping[str, str], *, embeddings: Need, t2d: Need, parallel: Need
) -> tuple[TensorRule, ...]:
    same: list[tuple[Any, ...]] = [
        ("fc.weight", ("E", "A*D"), "required", ""),
        ("fc_norm.{a}.weight", ("D",), "required", "fc_norm"),
        ("norm.weight", ("E",), "required", ""),
        ("lm_head.weight", ("W", "E"), "required", ""),
        ("embed_tokens.weight", ("V", "E"), embeddings, ""),
        ("d2t", ("W",), "required", "small vocabulary"),
        ("t2d", ("V",), t2d, "small vocabulary"),
        ("mask_hidden", ("1", "1", "A*D"), parallel, "parallel drafting"),
    ]
    return (
        *(TensorRule(name, name, *rule) for name, *rule in same),
        *_layer("layers.0", first, fused=True, norms=_FIRST_NORMS),
        *_layer("layers.{n}", "layers.{n}", deep=True, norms=deep_norms),
    )


def _eagle1_tensors(*, bias: TensorRule) -> tuple[TensorRule, ...]:
    after = {"post_attention_layernorm": "post_attention_layernorm"}
    return (
        TensorRule("fc.weight", "fc.weight", ("E", "2*E")),
        bias,
        *_layer("layers.0", "layers.0", norms=after),
        *_layer("layers.{n}", "layers.{n}", deep=True, norms=_DEEP_NORMS),
        TensorRule("embed_tokens.weight", "embed_tokens.weight", ("V", "E"), "ignored"),
        TensorRule("lm_head.weight", "lm_head.weight", ("V", "E"), "ignored"),
    )


# --- config keys -------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyRule:
    """One key of config.json: a dotted path, and the fact (see `facts`) that stands there."""

    theirs: str
    fact: str = ""  # "" : `value` stands there, whatever the draft
    value: Any = None
    need: Need = "required"
    feature: Feature = ""


_LLAMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "vocab_size", "rope_theta", "rope_parameters", "initializer_range", "torch_dtype",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


_DRAFT = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output")


def _facts(*names: str, prefix: str = "", need: Need = "required") -> list[KeyRule]:
    """Keys that are called as their facts are."""
    return [KeyRule(prefix + name, name, need=need) for name in names]


def _llama_keys(prefix: str = "") -> list[KeyRule]:
    return [
        KeyRule(f"{prefix}model_type", value="llama"),
        *_facts(*_LLAMA, prefix=prefix),
        KeyRule(f"{prefix}rope_scaling", "rope_scaling", feature="scaled rotary"),
        *_facts(*_TOKENS, prefix=prefix, need="optional"),
        *_facts("attention_bias", "mlp_bias", prefix=prefix),
        KeyRule(f"{prefix}tie_word_embeddings", value=False),
    ]


_MASK_TOKEN = KeyRule("mask_token_id", "mask_token_id", feature="parallel drafting")
# Ours: how deep the draft was trained to propose, where an export is all that is left of its run.
TRAINED = (
    "num_depths", "down_sample_ratio", "down_sample_ratio_min", "ttt_steps", "draft_tokens",
)  # fmt: skip
_PLAIN_KEYS = (
    KeyRule("architectures", value=["LlamaForCausalLMEagle3"]),
    *_llama_keys(),
    *_facts(*_DRAFT, "num_aux_hidden_states"),
    KeyRule("norm_before_residual", value=False),
    *_facts(*TRAINED, need="optional"),
)


# Read by `fledge import` alone: to an engine both versions are the same.
_EAGLE1_OWN = _facts("eagle_version", "draft_tokens", need="optional")


def _speculators_keys(kind: str) -> tuple[KeyRule, ...]:
    greedy = "speculators_config.proposal_methods.0"
    title = {"eagle3": "Eagle3", "peagle": "PEagle"}[kind]
    return (
        KeyRule("model_type", need="forbidden"),
        KeyRule("architectures", value=[f"{title}Speculator"]),
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
        *_llama_keys("transformer_layer_config."),
        *_facts(*_DRAFT, "torch_dtype"),
        KeyRule("norm_before_residual", value=False),
        KeyRule("norm_before_fc", value=False),
        KeyRule("embed_requires_grad", value=kind == "peagle", need="optional"),
        KeyRule("tie_word_embeddings", value=False, need="optional"),
        _MASK_TOKEN,
        *_facts(*TRAINED, need="optional"),
    )


# --- formats -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One layout on disk."""

    name: str
    tensors: tuple[TensorRule, ...]
    keys: tuple[KeyRule, ...]
    aux_ids_key: str  # where the aux layers stand; "": nowhere, the engine knows them
    aux_id_offset: int = 0  # the id in the file = number of the layer whose output it is + this
    always_aux_ids: bool = False  # even when they are the engine's default

    @property
    def ignored(self) -> set[str]:
        """Our tensors for which the engine takes the target's."""
        return {rule.ours for rule in self.tensors if rule.need == "ignored"}


_PLAIN_VLLM = Format(
    "plain-vllm",
    _tensors("layers.0", _DEEP_NORMS, embeddings="optional", t2d="optional", parallel="required"),
    (
        *_PLAIN_KEYS,
        _MASK_TOKEN,
        # vLLM's Llama has no q/k norms, its Qwen3 has
        KeyRule("architectures", value=["Eagle3Qwen3ForCausalLM"], feature="q/k norms"),
        KeyRule("model_type", value="qwen3", feature="q/k norms"),
        # Ours: an export for vLLM is also a draft that `fledge eval` and `init_from` read.
        *_facts("aux_layer_ids", "parallel_drafting", "qk_norm", need="optional"),
    ),
    aux_ids_key="eagle_aux_hidden_state_layer_ids",
    aux_id_offset=1,
)
_PLAIN_SGLANG = Format(
    "plain-sglang",
    _tensors(
        "midlayer", _SGLANG_DEEP_NORMS, embeddings="ignored", t2d="optional", parallel="forbidden"
    ),
    _PLAIN_KEYS,
    aux_ids_key="eagle_config.eagle_aux_hidden_state_layer_ids",
    aux_id_offset=0,
)
_SPECULATORS = [
    Format(
        f"speculators-{kind}",
        _tensors(
            "layers.0", _DEEP_NORMS, embeddings="required", t2d="required", parallel="required"
        ),
        _speculators_keys(kind),
        aux_ids_key="eagle_aux_hidden_state_layer_ids",
        aux_id_offset=1,
        always_aux_ids=True,
    )
    for kind in ("eagle3", "peagle")
]
_EAGLE1_VLLM = Format(
    "eagle1-vllm",
    _eagle1_tensors(bias=TensorRule("fc.bias", "fc.bias", ("E",), "forbidden", "fc bias")),
    (KeyRule("architectures", value=["EagleLlamaForCausalLM"]), *_llama_keys(), *_EAGLE1_OWN),
    aux_ids_key="",
)
_EAGLE1_SGLANG = Format(
    "eagle1-sglang",
    _eagle1_tensors(bias=TensorRule("fc.bias", "fc.bias", ("E",), zeros=True)),
    (KeyRule("architectures", value=["LlamaForCausalLMEagle"]), *_llama_keys(), *_EAGLE1_OWN),
    aux_ids_key="",
)
_FORMATS = (_PLAIN_VLLM, _PLAIN_SGLANG, *_SPECULATORS, _EAGLE1_VLLM, _EAGLE1_SGLANG)
FORMATS = {layout.name: layout for layout in _FORMATS}


# --- the tables applied to one draft -----------------------------------------------------------


@dataclass(frozen=True)
class ExpectedTensor:
    ours: str
    theirs: str
    shape: tuple[int, ...]
    need: Need
    zeros: bool = False


def expected_tensors(
    layout: Format, facts: Mapping[str, Any], features: frozenset[Feature]
) -> list[ExpectedTensor]:
    """Every tensor that a draft with these facts and features has in this format."""
    expected = []
    for rule in layout.tensors:
        if rule.feature and rule.feature not in features:
            continue
        if rule.deep and "several layers" not in features:
            continue
        shape = tuple(_dimension(part, facts) for part in rule.shape)
        numbers = range(1)
        if "{n}" in rule.ours:
            numbers = range(1, facts["num_hidden_layers"])
        elif "{a}" in rule.ours:
            numbers = range(facts["num_aux_hidden_states"])
        for number in numbers:
            ours, theirs = (name.format(n=number, a=number) for name in (rule.ours, rule.theirs))
            expected.append(ExpectedTensor(ours, theirs, shape, rule.need, rule.zeros))
    return expected


_SIZES = {
    "E": "hidden_size", "D": "target_hidden_size", "A": "num_aux_hidden_states", "V": "vocab_size",
    "W": "draft_vocab_size", "H": "num_attention_heads", "G": "num_key_value_heads",
    "C": "head_dim", "I": "intermediate_size",
}  # fmt: skip


def _dimension(text: str, facts: Mapping[str, Any]) -> int:
    return prod(int(part) if part.isdigit() else facts[_SIZES[part]] for part in text.split("*"))


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """`set_path(v, "a.b.0.c", x)`: a number makes a list of one element."""
    parts = path.split(".")
    here: Any = values
    for name, following in pairwise(parts):
        empty: Any = [{}] if following.isdigit() else {}
        here = here[int(name)] if name.isdigit() else here.setdefault(name, empty)
    here[parts[-1]] = value


def get_path(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where it ends early."""
    here: Any = values
    for name in path.split("."):
        if isinstance(here, list):
            here = here[int(name)] if int(name) < len(here) else None
        else:
            here = here.get(name) if isinstance(here, Mapping) else None
    return here
