"""The file format of each engine, described once: names of tensors and keys of config.json.

Export writes by it, `diagnose` and `import` read by the same names (`foreign.py`). The facts come
from running the engines (docs/formats.md explains them, docs/export.md lists versions and tests).
The formats of block drafts are in `methods/block/formats.py`. Writes no files.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fledge.methods.registry import method_of
from fledge.methods.shared.config import PLACEHOLDER_KEY
from fledge.methods.shared.rotary import rope_parameters

CARD_NAME = "README.md"
RECORD_NAME = "fledge_export.json"  # where an export came from and what was measured on it

NESTED_KEY = "transformer_layer_config"  # speculators: holds the config of the draft's layers
SPECULATORS_KEY = "speculators_model_type"
INNER_KEY = "dflash_config"  # DFlash: holds some keys, or all of its own
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
# The engines' classes. EAGLE-1: vLLM prefixes Llama's with "Eagle", SGLang's has it as a suffix.
EAGLE3_CLASS, EAGLE3_QWEN3_CLASS = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
EAGLE1_CLASSES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
# Properties that only some drafts have.
Feature = Literal[
    "parallel drafting", "several layers", "fc_norm", "norm_output", "small vocabulary",
    "trained embeddings", "chosen aux layers", "last layer", "other width", "partial rotary",
    "yarn attention factor", "fc bias", "attention bias", "mlp bias", "q/k norms",
    "blocks", "causal blocks", "sliding layers", "reduced head", "confidence head",
    "not three aux layers", "llama3 rotary of blocks",
    "refined blocks", "large or odd candidate sets",
    "reduced candidates",
]  # fmt: skip
Facts = Mapping[str, Any]  # the draft's config, and what `draft_facts` adds


@dataclass(frozen=True)
class Format:
    """One layout on disk. Tensors are called as in our drafts but for `renamed`."""

    name: str
    config: Callable[[Facts], dict[str, Any]]  # all of config.json but the aux layers
    aux_ids_key: str = ""  # path of the aux layers; "": not written, the engine fixes them
    aux_id_offset: int = 0  # id in the file = index of the layer whose output it is + this
    always_aux_ids: bool = False  # written even if they are the engine's default
    ignored: frozenset[str] = frozenset()  # left out: the engine takes the target's
    renamed: Mapping[str, str] = field(default_factory=dict)  # pattern of our name -> theirs
    adapted: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict  # to what the engine computes

    def tensor_name(self, ours: str) -> str:
        for pattern, theirs in self.renamed.items():
            ours = re.sub(pattern, theirs, ours)
        return ours


# --- keys of config.json -------------------------------------------------------------------------


LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_theta", "rope_parameters", "initializer_range",
)  # fmt: skip
_LLAMA = (*LAYER_KEYS, "vocab_size", "torch_dtype", "attention_bias", "mlp_bias")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What a nested Llama config holds; all other keys are beside it.
LLAMA_KEYS = (
    *_LLAMA, *TOKEN_KEYS, "architectures", "model_type", "dtype", "tie_word_embeddings",
    "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
# EAGLE-3.1's two norms; the first is of each aux state, before fc.
NORM_FLAGS: tuple[Feature, Feature] = ("fc_norm", "norm_output")
# Ours: how many tokens the draft was trained to propose, for exports without their run.
TRAINED = (
    "num_depths", "down_sample_ratio", "down_sample_ratio_min", "ttt_steps", "draft_tokens",
)  # fmt: skip


def taken(facts: Facts, *names: str) -> dict[str, Any]:
    return {name: facts[name] for name in names}


def if_set(facts: Facts, *names: str) -> dict[str, Any]:
    return {name: facts[name] for name in names if facts.get(name) is not None}


def llama_keys(facts: Facts, model_type: str = "llama") -> dict[str, Any]:
    keys = {"model_type": model_type, "tie_word_embeddings": False, **taken(facts, *_LLAMA)}
    if facts["rope_parameters"]["rope_type"] != "default":
        keys["rope_scaling"] = facts["rope_parameters"]
    return keys | if_set(facts, *TOKEN_KEYS)


def _plain_keys(facts: Facts) -> dict[str, Any]:
    return {
        **llama_keys(facts),
        **taken(
            facts, "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", *NORM_FLAGS
        ),
        **if_set(facts, *TRAINED),
        "architectures": [EAGLE3_CLASS],
        "norm_before_residual": False,
    }


def _plain_vllm_keys(facts: Facts) -> dict[str, Any]:
    keys = _plain_keys(facts)
    # Ours: an export for vLLM is also a draft that `fledge eval` and `init_from` read.
    keys |= if_set(facts, "aux_layer_ids", "parallel_drafting", "qk_norm")
    if facts["parallel_drafting"]:
        keys |= taken(facts, PLACEHOLDER_KEY)
    if facts["qk_norm"]:  # vLLM's Llama class has no q/k norms, its Qwen3 class does
        keys |= {"architectures": [EAGLE3_QWEN3_CLASS], "model_type": "qwen3"}
    return keys


def _eagle1_keys(facts: Facts, *, engine: str) -> dict[str, Any]:
    # the last two are read only by `fledge import`: engines treat both versions alike
    own = if_set(facts, "eagle_version", "draft_tokens")
    return {"architectures": [EAGLE1_CLASSES[engine]], **llama_keys(facts), **own}


def speculators_keys(
    facts: Facts, kind: str, architecture: str, layers: dict[str, Any]
) -> dict[str, Any]:
    """The keys that speculators writes for any draft; `layers` are those of its transformer."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": facts["num_draft_tokens"],
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        SPECULATORS_KEY: kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {
                "name_or_path": facts["target"],
                "architectures": facts["target_architectures"],
            },
        },
        NESTED_KEY: layers,
        **taken(facts, "draft_vocab_size", "target_hidden_size", "torch_dtype"),
        "tie_word_embeddings": False,
    }


def _speculators_chain_keys(facts: Facts, *, kind: str, architecture: str) -> dict[str, Any]:
    parallel = kind == "peagle"
    return {
        **speculators_keys(facts, kind, architecture, llama_keys(facts)),
        **taken(facts, *NORM_FLAGS),
        **if_set(facts, *TRAINED),
        **(taken(facts, PLACEHOLDER_KEY) if parallel else {}),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": parallel,
    }


# --- formats -------------------------------------------------------------------------------------


def zeros_for(weight_OI: Tensor) -> Tensor:
    """The bias of a projection that has none."""
    return weight_OI.new_zeros(len(weight_OI))


_TARGETS = frozenset({"embed_tokens.weight", "lm_head.weight"})
PLAIN_VLLM = Format("plain-vllm", _plain_vllm_keys, AUX_KEY, aux_id_offset=1)
PLAIN_SGLANG = Format(
    "plain-sglang",
    _plain_keys,
    f"eagle_config.{AUX_KEY}",
    ignored=frozenset({"embed_tokens.weight"}),
    # in its deeper layers the input norm is called hidden_norm
    renamed={
        r"^(layers\.[1-9]\d*)\.input_layernorm\.": r"\1.hidden_norm.",
        r"^layers\.0\.": "midlayer.",
    },
)
SPECULATORS_EAGLE3, SPECULATORS_PEAGLE = (
    Format(
        f"speculators-{kind}",
        partial(_speculators_chain_keys, kind=kind, architecture=architecture),
        AUX_KEY, aux_id_offset=1, always_aux_ids=True,
    )
    for kind, architecture in (("eagle3", "Eagle3Speculator"), ("peagle", "PEagleSpeculator"))
)  # fmt: skip
EAGLE1_VLLM = Format("eagle1-vllm", partial(_eagle1_keys, engine="vllm"), ignored=_TARGETS)
EAGLE1_SGLANG = Format(
    "eagle1-sglang",
    partial(_eagle1_keys, engine="sglang"),
    ignored=_TARGETS,
    adapted=lambda tensors: {"fc.bias": zeros_for(tensors["fc.weight"]), **tensors},
)


# --- one draft in a format -----------------------------------------------------------------------


@dataclass(frozen=True)
class TargetFacts:
    """What an export records about its target."""

    name: str = ""  # as the user names it
    served_as: str = ""  # as an engine is given it
    dtype: str = ""  # in which it ran in the self-check, else as stored; "": unknown
    architectures: list[str] = field(default_factory=list)
    layers: int | None = None  # None: unknown
    tokenizer_fingerprint: str | None = None


@dataclass(frozen=True)
class PlainDraft:
    """A draft's tensors and config, with the aux states in layer order."""

    config: PretrainedConfig
    tensors: dict[str, Tensor]

    @property
    def aux_layer_ids(self) -> list[int]:
        return list(self.config.aux_layer_ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype

    def to(self, dtype: torch.dtype) -> "PlainDraft":
        cast = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors.items()
        }
        return PlainDraft(self.config, cast)


def in_layer_order(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> PlainDraft:
    """The same draft with its aux layers ascending: engines pass the states in that order."""
    ids: Sequence[int] = config.aux_layer_ids
    state = dict(tensors)
    if list(ids) != sorted(ids):
        state |= sorted_chunks(ids, state)
        config = type(config)(**{**config.to_dict(), "aux_layer_ids": sorted(ids)})
    return PlainDraft(config, state)


def sorted_chunks(ids: Sequence[int], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that read or stand for the concatenated states, with their chunks in the order
    of the layers: fc, the mask state of P-EAGLE, and norms of all states or of each chunk."""
    order = sorted(range(len(ids)), key=lambda i: ids[i])
    changed = {}
    for name in {"fc.weight", "mask_hidden", "input_norm.weight"} & state.keys():
        chunks = state[name].chunk(len(ids), dim=-1)
        changed[name] = torch.cat([chunks[i] for i in order], dim=-1)
    norms = [f"{NORM_FLAGS[0]}.{i}.weight" for i in range(len(ids))]
    if all(name in state for name in norms):
        changed |= {name: state[norms[i]] for name, i in zip(norms, order, strict=True)}
    return changed


_YARN_ATTENTION = ("attention_factor", "mscale", "mscale_all_dim")


def draft_features(
    draft: PlainDraft, target: TargetFacts, *, trained_embeddings: bool
) -> frozenset[Feature]:
    """What an engine must be able to do to serve this draft."""
    config, rope = draft.config, rope_parameters(draft.config)
    ids, layers = draft.aux_layer_ids, target.layers
    # the default of vLLM and SGLang, as outputs of layers in our numbering
    default = None if layers is None else [1, layers // 2 - 1, layers - 4]
    present: dict[Feature, bool] = {
        "parallel drafting": config.parallel_drafting,
        "several layers": config.num_hidden_layers > 1,
        **{flag: vars(config)[flag] for flag in NORM_FLAGS},
        "small vocabulary": config.draft_vocab_size < config.vocab_size,
        "trained embeddings": trained_embeddings,
        "chosen aux layers": ids not in (default, [layers]),
        "last layer": layers is not None and layers - 1 in ids,
        "other width": config.target_hidden_size != config.hidden_size,
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "yarn attention factor": any(rope.get(name) is not None for name in _YARN_ATTENTION),
        "fc bias": "fc.bias" in draft.tensors,
        "attention bias": config.attention_bias,
        "mlp bias": config.mlp_bias,
        "q/k norms": config.qk_norm,
        "not three aux layers": len(ids) != 3,
        **method_of(config).export_features(config),
    }
    return frozenset(name for name, enabled in present.items() if enabled)


def draft_facts(draft: PlainDraft, target: TargetFacts, *, num_draft_tokens: int) -> dict[str, Any]:
    """Every value that a format writes, by name: the draft's own settings, and these."""
    rope = rope_parameters(draft.config)
    if rope["rope_type"] in ("yarn", "llama3"):  # transformers falls back to this, engines do not
        rope.setdefault("original_max_position_embeddings", draft.config.max_position_embeddings)
    return {
        **vars(draft.config),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "torch_dtype": str(draft.dtype).removeprefix("torch."),
        "aux_layer_ids": draft.aux_layer_ids,
        "num_draft_tokens": num_draft_tokens,
        "target": target.served_as,
        "target_architectures": target.architectures,
        "num_target_layers": target.layers,
    }


def config_values(layout: Format, facts: Facts, features: frozenset[Feature]) -> dict[str, Any]:
    """The contents of config.json."""
    values = layout.config(facts)
    if layout.aux_ids_key and (layout.always_aux_ids or "chosen aux layers" in features):
        ids = [layer + layout.aux_id_offset for layer in facts["aux_layer_ids"]]
        set_path(values, layout.aux_ids_key, ids)
    return values


def file_tensors(layout: Format, draft: PlainDraft) -> dict[str, Tensor]:
    """The tensors under their names in the file."""
    own = {name: t for name, t in draft.tensors.items() if name not in layout.ignored}
    tensors = layout.adapted(own)
    return {layout.tensor_name(name): t.detach().contiguous() for name, t in tensors.items()}


# --- dotted paths --------------------------------------------------------------------------------


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path such as "a.b.0.c"; a number makes a list of one element."""
    parts = path.split(".")
    node: Any = values
    for name, following in pairwise(parts):
        empty: Any = [{}] if following.isdigit() else {}
        if name.isdigit():
            node = node[int(name)]
            continue
        if not isinstance(node.get(name), type(empty)):
            node[name] = empty
        node = node[name]
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
