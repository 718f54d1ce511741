"""Read an exported DFlash or DSpark draft back the way its engine does; see `reread`.

Like `reread`, this module shares no table with the writer. It follows the engines in where they
look for the layers, the mask token and the attention direction, and in what they assume by default.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from fledge.draft.base import DraftModel
from fledge.export.reread import Reread, TargetSide, engine_config, require

_CLASSES = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
_KINDS = ("dflash", "dspark")
_BACKBONE = ("fc.", "hidden_norm.", "norm.", "layers.")
_HEADS = ("markov_head.", "confidence_head.")


class BlockReread(Reread):
    """A block draft, whose head is the target's, or the rows of it that are in the files."""

    def model(self) -> DraftModel:
        state = {name: value for name, value in self.tensors.items() if name != "lm_head.weight"}
        return Reread(self.config, state, self.unread).model()


def block_kind(values: Mapping[str, Any]) -> str | None:
    """dflash or dspark; None for any other kind of draft."""
    kind = values.get("speculators_model_type")
    if kind in _KINDS:
        return str(kind)
    return _CLASSES.get((values.get("architectures") or [""])[0])


def reread_block(
    values: dict[str, Any], tensors: dict[str, Tensor], engine: str, target: TargetSide
) -> Reread:
    """The draft that `engine` would serve from these files."""
    kind = block_kind(values)
    if engine == "speculators":
        config = _speculators_config(values)
    else:
        require(values.get("model_type") == "qwen3", "model_type")
        layers = values.get("num_target_layers")
        require(None in (layers, target.layers) or layers == target.layers, "num_target_layers")
        config = _flat_config(values, engine)
    _set_heads(config, values, tensors, with_markov=kind == "dspark")
    prefixes = _BACKBONE + (_HEADS if kind == "dspark" else ())
    if engine != "sglang":  # which skips what it does not know
        prefixes += ("lm_head.", "d2t", "t2d")
    return BlockReread(
        config, dict(tensors), [name for name in tensors if not name.startswith(prefixes)]
    )


def _flat_config(values: dict[str, Any], engine: str) -> LlamaConfig:
    nested = values.get("dflash_config") or {}
    vllm_ids = values.get("eagle_aux_hidden_state_layer_ids") if engine == "vllm" else None
    ids = nested.get("target_layer_ids") or values.get("target_layer_ids") or []
    if vllm_ids:  # vLLM looks here first; its ids count the state before layer 0
        ids = [i - 1 for i in vllm_ids]
    require(bool(ids) and ids == sorted(set(ids)), "target_layer_ids")
    mask = nested.get("mask_token_id", values.get("mask_token_id"))
    config = engine_config(values, values, aux_layer_ids=list(ids), mask_token_id=mask)
    causal = values.get("is_causal")
    if causal is None and engine == "vllm":
        causal = nested.get("causal")
    _set_block(config, values, values, causal=causal)
    return config


def _speculators_config(values: dict[str, Any]) -> LlamaConfig:
    outer = values["speculators_config"]
    require(outer["algorithm"] == values["speculators_model_type"], "speculators_config.algorithm")
    require("model_type" not in values, "model_type")
    [proposal] = outer["proposal_methods"]
    require(bool(outer["verifier"]["name_or_path"]), "verifier")
    layers = values["transformer_layer_config"]
    require(layers.get("model_type") == "qwen3", "transformer_layer_config.model_type")
    ids = [i - 1 for i in values["aux_hidden_state_layer_ids"]]
    mask = values["mask_token_id"]
    config = engine_config(layers, values, aux_layer_ids=ids, mask_token_id=mask)
    # vLLM takes `sliding_window_non_causal: false` to mean that every layer is causal
    _set_block(config, layers, values, causal=not values.get("sliding_window_non_causal", True))
    drafted = config.block_size - (0 if values.get("sample_from_anchor", False) else 1)
    require(proposal["speculative_tokens"] == drafted, "speculative_tokens")
    return config


def _set_block(
    config: LlamaConfig,
    layers: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    causal: bool | None,
) -> None:
    """`causal`: whether all layers are causal; None: only the sliding ones are."""
    kinds = layers.get("layer_types") or ["full_attention"] * config.num_hidden_layers
    require(len(kinds) == config.num_hidden_layers, "layer_types")
    sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    require(not sliding or causal is not False, "is_causal")  # our sliding layers are causal
    require(layers.get("is_neox_style", True) is True, "is_neox_style")
    config.sliding_layers = sliding
    config.sliding_window = None
    if sliding:  # without the flag, transformers' Qwen3 drops the window
        require(layers.get("use_sliding_window") is True, "use_sliding_window")
        config.sliding_window = layers["sliding_window"]
    config.causal = bool(causal)
    config.qk_norm = True
    config.block_size = values["block_size"]


def _set_heads(
    config: LlamaConfig,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    with_markov: bool,
) -> None:
    config.markov_rank, config.confidence_head = 0, False
    flat = "speculators_model_type" not in values
    config.sample_from_anchor = with_markov and values.get("sample_from_anchor", flat)
    if not with_markov:
        return
    require(values.get("markov_head_type", "vanilla") == "vanilla", "markov_head_type")
    config.markov_rank = values["markov_rank"]
    # enabled, but not in the file: vLLM serves without it
    config.confidence_head = bool(
        values.get("enable_confidence_head", not flat) and "confidence_head.proj.weight" in tensors
    )
    reads_both = values.get("confidence_head_with_markov", not flat)
    require(not config.confidence_head or reads_both, "confidence_head_with_markov")
