"""The layouts in which trainers write drafts, and how to tell them apart."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fledge.export.formats import TRAINED

OWN_AUX_KEY = "aux_layer_ids"
NESTED_KEY = "transformer_layer_config"
SPECULATORS_KEY = "speculators_model_type"
# vLLM's own format of EAGLE-1: this model_type, and the Llama config nested under this key.
WRAPPED_TYPE, WRAPPED_KEY = "eagle", "model"


@dataclass(frozen=True)
class FileLayout:
    """How one family of trainers writes a draft."""

    name: str
    made_by: str
    prefix: str = ""  # of every tensor of the backbone
    nested: str = ""  # the key that holds the Llama config; "": it is flat
    beside: frozenset[str] = frozenset()  # keys that are next to it, not in it


_BESIDE_SPECULATORS = frozenset({
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "target_hidden_size", "mask_token_id", "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids", *TRAINED,
})  # fmt: skip

LAYOUTS = {
    layout.name: layout
    for layout in (
        FileLayout("fledge", "fledge, and its exports for vLLM"),
        FileLayout("eagle", "SafeAILab EAGLE"),
        FileLayout("specforge", "SpecForge, TorchSpec, and our exports for SGLang"),
        FileLayout("speculators", "speculators", nested=NESTED_KEY, beside=_BESIDE_SPECULATORS),
        FileLayout("automodel", "NeMo AutoModel", prefix="model."),
        FileLayout("modelopt", "NVIDIA ModelOpt"),
        FileLayout("eagle1-vllm", "a trainer for vLLM's EAGLE-1, such as ours"),
        FileLayout("eagle1-sglang", "a trainer for SGLang's EAGLE-1, such as ours"),
        FileLayout(
            "eagle1-wrapped", "a converter for vLLM's EAGLE-1", nested=WRAPPED_KEY,
            beside=frozenset({"eagle_version", "eagle_fc_bias"}),
        ),
    )
}  # fmt: skip


def eagle1_layout(config: dict[str, Any]) -> FileLayout:
    """The layout of an EAGLE-1 or EAGLE-2 draft; tensor names are the same in all of them."""
    if config.get("model_type") == WRAPPED_TYPE and isinstance(config.get(WRAPPED_KEY), dict):
        return LAYOUTS["eagle1-wrapped"]
    if OWN_AUX_KEY in config:
        return LAYOUTS["fledge"]
    named = config.get("architectures") or []
    if "EagleLlamaForCausalLM" in named:
        return LAYOUTS["eagle1-vllm"]
    return LAYOUTS["eagle1-sglang" if "LlamaForCausalLMEagle" in named else "eagle"]


def eagle3_layout(config: dict[str, Any], names: Iterable[str]) -> FileLayout:
    """The layout of an EAGLE-3 or P-EAGLE draft."""
    names = list(names)
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
    return LAYOUTS["specforge" if "LlamaForCausalLMEagle3" in architectures else "eagle"]
