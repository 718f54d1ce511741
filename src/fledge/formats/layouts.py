"""How trainers write drafts: keys of config.json, layouts, places of the aux layers, tensors.

What a draft's files hold in these terms is read by `foreign.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fledge.core.reading import Expected, Flag, ListOf, Maybe, Number, Table, Text, Whole
from fledge.formats.codec import (
    AUX_KEY,
    EAGLE1_CLASSES,
    EAGLE3_CLASS,
    INNER_KEY,
    NESTED_KEY,
    PLAIN_SGLANG,
    PLAIN_VLLM,
    SPECULATORS_KEY,
)
from fledge.methods.shared.config import PLACEHOLDER_KEY, config_keys

OWN_AUX_KEY = "aux_layer_ids"
# Keys under which engines look for the mask token, in this order.
MASK_KEYS = (PLACEHOLDER_KEY, "dspark_noise_token_id", "pard_token", "ptd_token_id")


# --- config.json: the keys that are read, and their permitted values -----------------------------


_OURS = config_keys()
_AUX = _OURS[OWN_AUX_KEY]
_THEIRS: dict[Expected, tuple[str, ...]] = {
    Whole(1, 2**40): ("num_depths", "ttt_steps", "draft_tokens", "eagle_version",
                      "num_target_layers"),
    Whole(0, 2**31): (*MASK_KEYS[1:], "xpress_num_passes", "lilicorr_candidate_topk"),
    Whole(1, 2**16): ("emb_dim", "xpress_rank", "xpress_mlp_ratio", "selector_top_k"),
    Number(0, 1): ("down_sample_ratio", "down_sample_ratio_min"),
    Number(1e-300): ("factor",),
    Flag(): ("norm_before_fc", "qk_norm", "fc_bias", "is_causal", "use_swa", "shift_label",
             "sliding_window_non_causal"),
    Text(256): ("model_type", "rope_type", "type", "markov_head_type", "projector_type"),
    ListOf(Text(256), most=2**10): ("architectures", "layer_types"),
    _AUX: (AUX_KEY, "target_layer_ids", "aux_hidden_state_layer_ids"),
}  # fmt: skip
_KEYS = {key: Maybe(kind) for key, kind in _OURS.items()}
_KEYS |= {key: Maybe(kind) for kind, keys in _THEIRS.items() for key in keys}
_NESTED = (NESTED_KEY, "speculators_config", "eagle_config", INNER_KEY)


def _config(depth: int) -> Table:
    """The schema of a config with `depth` levels of nested configs; null counts as absent."""
    nested = dict.fromkeys(_NESTED, Maybe(_config(depth - 1))) if depth else {}
    return Table(optional=_KEYS | nested)


CONFIG = _config(3)


# --- layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileLayout:
    """How one family of trainers writes a draft."""

    name: str
    made_by: str
    prefix: str = ""  # of every tensor of the backbone
    nested: str = ""  # the key that holds the Llama config; "": it is flat
    read_by: tuple[str, ...] = ("vllm",)  # the engines that load it as it is


def by_name(*layouts: FileLayout) -> dict[str, FileLayout]:
    return {layout.name: layout for layout in layouts}


LAYOUTS = by_name(
    FileLayout("fledge", "fledge, and its exports for vLLM"),
    FileLayout("eagle", "SafeAILab EAGLE"),
    FileLayout(
        "specforge",
        "SpecForge, TorchSpec, and our exports for SGLang",
        read_by=("vllm", "sglang"),
    ),
    FileLayout("speculators", "speculators", nested=NESTED_KEY),
    FileLayout("automodel", "NeMo AutoModel", prefix="model.", read_by=()),
    FileLayout("modelopt", "NVIDIA ModelOpt"),
    FileLayout("eagle1-vllm", "a trainer for vLLM's EAGLE-1, such as ours"),
    FileLayout(
        "eagle1-sglang", "a trainer for SGLang's EAGLE-1, such as ours", read_by=("sglang",)
    ),
)


def eagle1_layout(config: Mapping[str, Any]) -> FileLayout:
    """The layout of an EAGLE-1 or EAGLE-2 draft; tensor names are the same in all of them."""
    if OWN_AUX_KEY in config:
        return LAYOUTS["fledge"]
    named = config.get("architectures") or []
    written = (f"eagle1-{engine}" for engine, name in EAGLE1_CLASSES.items() if name in named)
    return LAYOUTS[next(written, "eagle")]


def eagle3_layout(config: Mapping[str, Any], names: Iterable[str]) -> FileLayout:
    """The layout of an EAGLE-3 or P-EAGLE draft."""
    if SPECULATORS_KEY in config:
        return LAYOUTS["speculators"]
    if any(name.startswith(("model.layers.", "model.fc.")) for name in names):
        return LAYOUTS["automodel"]
    architectures = config.get("architectures") or []
    if "PEagleDraftModel" in architectures:  # even if it was trained on from a draft of ours
        return LAYOUTS["specforge"]
    if OWN_AUX_KEY in config or "parallel_drafting" in config:
        return LAYOUTS["fledge"]
    if "next_layer_regular" in (config.get("eagle_config") or {}):
        return LAYOUTS["modelopt"]
    if not any(name.startswith("midlayer.") for name in names):
        return LAYOUTS["fledge"]
    return LAYOUTS["specforge" if EAGLE3_CLASS in architectures else "eagle"]


@dataclass(frozen=True)
class AuxPlace:
    """A config key that may hold the aux layers, and what its ids add to "output of layer i".

    vLLM and speculators count residuals, of which there is one before layer 0; SGLang, ModelOpt
    and fledge count layers.
    """

    name: str
    path: str
    shift: int


OURS, VLLM, SGLANG = (
    AuxPlace("fledge", OWN_AUX_KEY, 0),
    *(
        AuxPlace(engine, layout.aux_ids_key, layout.aux_id_offset)
        for engine, layout in (("vllm", PLAIN_VLLM), ("sglang", PLAIN_SGLANG))
    ),
)


# --- tensors -------------------------------------------------------------------------------------


# Tensors of optional parts of a layer, by their flag in our config.
LAYER_EXTRAS: dict[str, tuple[str, ...]] = {
    "qk_norm": tuple(f"self_attn.{x}_norm.weight" for x in "qk"),
    "attention_bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkvo"),
    "mlp_bias": tuple(f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")),
}
