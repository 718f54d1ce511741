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

Those of DFlash and DSpark are in `block_formats`, the types of the tables' rows in `rules`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from fledge.export.block_formats import BLOCK_FORMATS
from fledge.export.rules import (
    DEEP_NORMS,
    Feature,
    Format,
    KeyRule,
    Need,
    TensorRule,
    fact_keys,
    layer_rules,
    llama_keys,
    speculators_keys,
)

CARD_NAME = "README.md"
RECORD_NAME = "fledge_export.json"  # where an export came from and what was measured on it


# --- tensors -----------------------------------------------------------------------------------


_FIRST_NORMS = {**DEEP_NORMS, "hidden_norm": "hidden_norm"}
# In SGLang's deeper layers the input norm is called hidden_norm.
_SGLANG_DEEP_NORMS = {**DEEP_NORMS, "input_layernorm": "hidden_norm"}


def _tensors(
    first: str, deep_norms: Mapping[str, str], *, embeddings: Need, t2d: Need, parallel: Need
) -> tuple[TensorRule, ...]:
    same_names: list[tuple[Any, ...]] = [
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
        *(TensorRule(name, name, *rule) for name, *rule in same_names),
        *layer_rules("layers.0", first, fused=True, norms=_FIRST_NORMS),
        *layer_rules("layers.{n}", "layers.{n}", deep=True, norms=deep_norms),
    )


def _eagle1_tensors(*, bias: TensorRule) -> tuple[TensorRule, ...]:
    norms = {"post_attention_layernorm": "post_attention_layernorm"}
    return (
        TensorRule("fc.weight", "fc.weight", ("E", "2*E")),
        bias,
        *layer_rules("layers.0", "layers.0", norms=norms),
        *layer_rules("layers.{n}", "layers.{n}", deep=True, norms=DEEP_NORMS),
        TensorRule("embed_tokens.weight", "embed_tokens.weight", ("V", "E"), "ignored"),
        TensorRule("lm_head.weight", "lm_head.weight", ("V", "E"), "ignored"),
    )


# --- config keys -------------------------------------------------------------------------------


_DRAFT = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output")
_MASK_TOKEN = KeyRule("mask_token_id", "mask_token_id", feature="parallel drafting")
# Ours: how many tokens the draft was trained to propose, for exports without their run.
TRAINED = (
    "num_depths", "down_sample_ratio", "down_sample_ratio_min", "ttt_steps", "draft_tokens",
)  # fmt: skip
_PLAIN_KEYS = (
    KeyRule("architectures", value=["LlamaForCausalLMEagle3"]),
    *llama_keys(),
    *fact_keys(*_DRAFT, "num_aux_hidden_states"),
    KeyRule("norm_before_residual", value=False),
    *fact_keys(*TRAINED, need="optional"),
)


# Read only by `fledge import`: engines treat both versions alike.
_EAGLE1_OWN = fact_keys("eagle_version", "draft_tokens", need="optional")


def _speculators_keys(kind: str) -> tuple[KeyRule, ...]:
    title = {"eagle3": "Eagle3", "peagle": "PEagle"}[kind]
    layers = llama_keys("transformer_layer_config.")
    return (
        *speculators_keys(kind, f"{title}Speculator", layers),
        *fact_keys(*_DRAFT, "torch_dtype"),
        KeyRule("norm_before_residual", value=False),
        KeyRule("norm_before_fc", value=False),
        KeyRule("embed_requires_grad", value=kind == "peagle", need="optional"),
        KeyRule("tie_word_embeddings", value=False, need="optional"),
        _MASK_TOKEN,
        *fact_keys(*TRAINED, need="optional"),
    )


# --- formats -----------------------------------------------------------------------------------


_PLAIN_VLLM = Format(
    "plain-vllm",
    _tensors("layers.0", DEEP_NORMS, embeddings="optional", t2d="optional", parallel="required"),
    (
        *_PLAIN_KEYS,
        _MASK_TOKEN,
        # vLLM's Llama class has no q/k norms, its Qwen3 class does
        KeyRule("architectures", value=["Eagle3Qwen3ForCausalLM"], feature="q/k norms"),
        KeyRule("model_type", value="qwen3", feature="q/k norms"),
        # Ours: an export for vLLM is also a draft that `fledge eval` and `init_from` read.
        *fact_keys("aux_layer_ids", "parallel_drafting", "qk_norm", need="optional"),
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
            "layers.0", DEEP_NORMS, embeddings="required", t2d="required", parallel="required"
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
    (KeyRule("architectures", value=["EagleLlamaForCausalLM"]), *llama_keys(), *_EAGLE1_OWN),
    aux_ids_key="",
)
_EAGLE1_SGLANG = Format(
    "eagle1-sglang",
    _eagle1_tensors(bias=TensorRule("fc.bias", "fc.bias", ("E",), zeros=True)),
    (KeyRule("architectures", value=["LlamaForCausalLMEagle"]), *llama_keys(), *_EAGLE1_OWN),
    aux_ids_key="",
)
_FORMATS = (
    _PLAIN_VLLM, _PLAIN_SGLANG, *_SPECULATORS, _EAGLE1_VLLM, _EAGLE1_SGLANG, *BLOCK_FORMATS,
)  # fmt: skip
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
    "C": "head_dim", "I": "intermediate_size", "R": "markov_rank",
}  # fmt: skip


def _dimension(text: str, facts: Mapping[str, Any]) -> int:
    if "+" in text:
        return sum(_dimension(part, facts) for part in text.split("+"))
    return prod(int(part) if part.isdigit() else facts[_SIZES[part]] for part in text.split("*"))


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path such as "a.b.0.c"; a number makes a list of one element."""
    parts = path.split(".")
    node: Any = values
    for name, following in pairwise(parts):
        empty: Any = [{}] if following.isdigit() else {}
        node = node[int(name)] if name.isdigit() else node.setdefault(name, empty)
    node[parts[-1]] = value


def get_path(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it does not exist."""
    node: Any = values
    for name in path.split("."):
        if isinstance(node, list):
            node = node[int(name)] if int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, Mapping) else None
    return node
