"""What each engine reads from a draft, as tables: tensors and config keys (`engines`: versions).

The writer follows these tables; `diagnose` and `import` use them too. Nothing here opens a file or
imports torch. The facts come from running the engines (docs/formats.md explains them,
docs/export.md lists versions and tests).

    plain-vllm           layers.N.*, config.json of a Llama                        vLLM
    plain-sglang         midlayer.* (and layers.N.*), config.json of a Llama       SGLang
    speculators-eagle3   layers.N.*, the nested config of the speculators package  vLLM, speculators
    speculators-peagle   the same for P-EAGLE

Shape symbols: E draft hidden, D target hidden, A aux states, V / W target / draft vocabulary,
Q / K query / key width (heads x channels), I width of the MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal

# required: without it the engine fails or, worse, serves noise. optional: not needed; read by the
# engine or by trainers when there. ignored: the engine takes the target's. forbidden: misread.
Need = Literal["required", "optional", "forbidden", "ignored"]
# What a draft has that not every draft has; "" is what all have.
Feature = Literal[
    "",
    "parallel drafting",
    "several layers",
    "fc_norm",
    "norm_output",
    "small vocabulary",
    "trained embeddings",
    "chosen aux layers",
    "last layer",
    "other width",
    "scaled rotary",
    "partial rotary",
    "yarn attention factor",
]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
CARD_NAME = "README.md"
RECORD_NAME = "fledge_export.json"  # where an export came from and what was measured on it


# --- tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorRule:
    """One tensor: our name, theirs, its shape, and when it is in the file."""

    ours: str  # {n}: number of a layer, {a}: number of an aux state
    theirs: str
    shape: tuple[str, ...]
    need: Need = "required"
    feature: Feature = ""  # only drafts with this feature have it


def _layer(ours: str, theirs: str, *, fused: bool, norms: Mapping[str, str]) -> list[TensorRule]:
    """One decoder layer; `norms` maps our norms to theirs."""
    width = "2*E" if fused else "E"
    shapes = {
        "self_attn.q_proj": ("Q", width),
        "self_attn.k_proj": ("K", width),
        "self_attn.v_proj": ("K", width),
        "self_attn.o_proj": ("E", "Q"),
        "mlp.gate_proj": ("I", "E"),
        "mlp.up_proj": ("I", "E"),
        "mlp.down_proj": ("E", "I"),
    }
    feature: Feature = "" if fused else "several layers"
    rules: list[tuple[str, str, tuple[str, ...]]] = [(name, name, shapes[name]) for name in shapes]
    rules += [(own, their, ("E",)) for own, their in norms.items()]
    return [
        TensorRule(f"{ours}.{own}.weight", f"{theirs}.{their}.weight", shape, feature=feature)
        for own, their, shape in rules
    ]


_FIRST_NORMS = {
    name: name for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
}
_DEEP_NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
# SGLang's deeper layers norm their input with what they call hidden_norm.
_SGLANG_DEEP_NORMS = {**_DEEP_NORMS, "input_layernorm": "hidden_norm"}


def _tensors(
    first: str, deep_norms: Mapping[str, str], *, embeddings: Need, t2d: Need, parallel: Need
) -> tuple[TensorRule, ...]:
    same = [
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
        *(TensorRule(name, name, shape, need, feature) for name, shape, need, feature in same),  # type: ignore[arg-type]
        *_layer("layers.0", first, fused=True, norms=_FIRST_NORMS),
        *_layer("layers.{n}", "layers.{n}", fused=False, norms=deep_norms),
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


def _llama_keys(prefix: str = "") -> list[KeyRule]:
    return [
        KeyRule(f"{prefix}model_type", value="llama"),
        *(KeyRule(f"{prefix}{name}", name) for name in _LLAMA),
        KeyRule(f"{prefix}rope_scaling", "rope_scaling", feature="scaled rotary"),
        *(KeyRule(f"{prefix}{name}", name, need="optional") for name in _TOKENS),
        KeyRule(f"{prefix}attention_bias", value=False, need="optional"),
        KeyRule(f"{prefix}mlp_bias", value=False, need="optional"),
        KeyRule(f"{prefix}tie_word_embeddings", value=False),
    ]


_PLAIN_KEYS = (
    KeyRule("architectures", value=["LlamaForCausalLMEagle3"]),
    *_llama_keys(),
    KeyRule("draft_vocab_size", "draft_vocab_size"),
    KeyRule("target_hidden_size", "target_hidden_size"),
    KeyRule("num_aux_hidden_states", "num_aux_hidden_states"),
    KeyRule("norm_before_residual", value=False),
    KeyRule("fc_norm", "fc_norm"),
    KeyRule("norm_output", "norm_output"),
)


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
        KeyRule("draft_vocab_size", "draft_vocab_size"),
        KeyRule("target_hidden_size", "target_hidden_size"),
        KeyRule("norm_before_residual", value=False),
        KeyRule("norm_before_fc", value=False),
        KeyRule("fc_norm", "fc_norm"),
        KeyRule("norm_output", "norm_output"),
        KeyRule("embed_requires_grad", value=kind == "peagle", need="optional"),
        KeyRule("torch_dtype", "torch_dtype"),
        KeyRule("tie_word_embeddings", value=False, need="optional"),
        KeyRule("mask_token_id", "mask_token_id", feature="parallel drafting"),
    )  # fmt: skip


# --- formats -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """One layout on disk."""

    name: str
    tensors: tuple[TensorRule, ...]
    keys: tuple[KeyRule, ...]
    aux_ids_key: str  # where the aux layers stand; absent: the default of vLLM and SGLang
    aux_id_offset: int  # the id in the file = number of the layer whose output it is + this
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
        KeyRule("mask_token_id", "mask_token_id", feature="parallel drafting"),
        # Ours: an export for vLLM is also a draft that `fledge eval` and `init_from` read.
        KeyRule("aux_layer_ids", "aux_layer_ids", need="optional"),
        KeyRule("parallel_drafting", "parallel_drafting", need="optional"),
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
_SPECULATORS = {
    kind: Format(
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
}
FORMATS: dict[str, Format] = {
    one.name: one for one in (_PLAIN_VLLM, _PLAIN_SGLANG, *_SPECULATORS.values())
}


# --- the tables applied to one draft -----------------------------------------------------------


@dataclass(frozen=True)
class ExpectedTensor:
    ours: str
    theirs: str
    shape: tuple[int, ...]
    need: Need


def expected_tensors(
    layout: Format, facts: Mapping[str, Any], features: frozenset[Feature]
) -> list[ExpectedTensor]:
    """Every tensor that a draft with these facts and features has in this format."""
    sizes = _sizes(facts)
    expected = []
    for rule in layout.tensors:
        if rule.feature and rule.feature not in features:
            continue
        numbers: list[dict[str, int]] = [{}]
        if "{n}" in rule.ours:
            numbers = [{"n": n} for n in range(1, facts["num_hidden_layers"])]
        elif "{a}" in rule.ours:
            numbers = [{"a": a} for a in range(sizes["A"])]
        shape = tuple(_dimension(part, sizes) for part in rule.shape)
        expected += [
            ExpectedTensor(
                rule.ours.format(**number), rule.theirs.format(**number), shape, rule.need
            )
            for number in numbers
        ]
    return expected


def _sizes(facts: Mapping[str, Any]) -> dict[str, int]:
    return {
        "E": facts["hidden_size"],
        "D": facts["target_hidden_size"],
        "A": facts["num_aux_hidden_states"],
        "V": facts["vocab_size"],
        "W": facts["draft_vocab_size"],
        "Q": facts["num_attention_heads"] * facts["head_dim"],
        "K": facts["num_key_value_heads"] * facts["head_dim"],
        "I": facts["intermediate_size"],
    }


def _dimension(text: str, sizes: Mapping[str, int]) -> int:
    return prod(int(part) if part.isdigit() else sizes[part] for part in text.split("*"))


def default_engine_aux_ids(target_layers: int) -> list[int]:
    """What vLLM and SGLang take when the config does not say, as outputs of our layers."""
    return [1, target_layers // 2 - 1, target_layers - 4]


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
