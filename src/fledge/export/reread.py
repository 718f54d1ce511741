"""Read an export back the way its engine reads it. Deliberately without the tables of `formats.py`:
an error there must not confirm itself, so this module implements the formats independently.

Each reader does what the engine's loader does, including what it does silently (SGLang skips names
that it does not know and takes the target's embeddings; vLLM and SGLang fall back to default aux
layers), and returns a draft of ours. Any difference from the exported draft is then a fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.core.reading import load_tensors, read_json
from fledge.draft.base import DraftModel
from fledge.draft.rotary import rotary_frequencies
from fledge.methods.registry import method_of

_LLAMA = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Reread:
    """The draft as an engine reads it from the files."""

    config: LlamaConfig
    tensors: dict[str, Tensor]  # under our names
    unread: list[str]  # names in the file that the engine skips

    def model(self) -> DraftModel:
        draft_type = method_of(self.config).draft_type()
        return draft_type.from_tensors(self.config, self.tensors, where=Path("the export"))


@dataclass(frozen=True)
class TargetSide:
    """What an engine takes from the target instead of the files."""

    layers: int | None
    embeddings_VE: Tensor | None = None
    head_VE: Tensor | None = None


def reread(directory: Path, engine: str, target: TargetSide) -> Reread:
    """The draft that `engine` would serve from these files."""
    values = read_json(directory / "config.json", what="the export's config")
    tensors: dict[str, Tensor] = load_tensors(directory / "model.safetensors", what="the export")
    readers = {"vllm": _as_vllm, "sglang": _as_sglang, "speculators": _as_speculators}
    from fledge.export.reread_block import block_kind, reread_block  # it imports this module

    if block_kind(values) is not None:
        return reread_block(values, tensors, engine, target)
    if values.get("architectures") == _EAGLE1_CLASSES.get(engine):
        return _as_eagle1(values, tensors, target)
    return readers[engine](values, tensors, target)


def _as_vllm(values: dict[str, Any], tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    has_qk_norms = values.get("architectures") == ["Eagle3Qwen3ForCausalLM"]
    require(
        has_qk_norms or values.get("architectures") == ["LlamaForCausalLMEagle3"], "architectures"
    )
    require(values.get("model_type") == ("qwen3" if has_qk_norms else "llama"), "model_type")
    require(not values.get("norm_before_residual", False), "norm_before_residual")
    key, nested = "eagle_aux_hidden_state_layer_ids", values.get("eagle_config") or {}
    ids = values.get(key) or nested.get(key)
    state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    if "embed_tokens.weight" not in state:
        state |= _target_embeddings(target, state)
    config = engine_config(
        values,
        values,
        aux_layer_ids=_layer_outputs(ids, target.layers),
        mask_token_id=values.get("mask_token_id"),
        parallel="mask_hidden" in state,
    )
    config.qk_norm = has_qk_norms
    return Reread(config, state, [])


def _as_sglang(values: dict[str, Any], tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    require(values.get("architectures") == ["LlamaForCausalLMEagle3"], "architectures")
    require(not values.get("tie_word_embeddings", False), "tie_word_embeddings")
    require(not values.get("norm_before_residual", False), "norm_before_residual")
    ids = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = _default_layers(target.layers)
    read_prefixes = ("fc.", "fc_norm.", "midlayer.", "norm.", "lm_head.", "d2t", "t2d")
    state, unread = {}, []
    for name, tensor in tensors.items():
        if name.startswith("layers.") and not name.startswith("layers.0."):
            # in its deeper layers the input norm is called hidden_norm
            state[name.replace(".hidden_norm.", ".input_layernorm.")] = tensor
        elif name.startswith(read_prefixes):
            state[name.replace("midlayer.", "layers.0.")] = tensor
        else:
            unread.append(name)
    state |= _target_embeddings(target, state)
    return Reread(engine_config(values, values, aux_layer_ids=ids), state, unread)


def _as_speculators(
    values: dict[str, Any], tensors: dict[str, Tensor], target: TargetSide
) -> Reread:
    kind = values["speculators_model_type"]
    require(kind in ("eagle3", "peagle"), "speculators_model_type")
    require(values["speculators_config"]["algorithm"] == kind, "speculators_config.algorithm")
    require("model_type" not in values, "model_type")
    [proposal] = values["speculators_config"]["proposal_methods"]
    require(proposal["speculative_tokens"] > 0, "speculative_tokens")
    require(bool(values["speculators_config"]["verifier"]["name_or_path"]), "verifier")
    default = kind == "eagle3"
    require(not values.get("norm_before_residual", default), "norm_before_residual")
    config = engine_config(
        values["transformer_layer_config"],
        values,
        aux_layer_ids=_layer_outputs(values.get("eagle_aux_hidden_state_layer_ids"), target.layers),
        parallel=kind == "peagle",
        mask_token_id=values["mask_token_id"] if kind == "peagle" else None,
    )
    return Reread(config, dict(tensors), [])


_EAGLE1_CLASSES = {"vllm": ["EagleLlamaForCausalLM"], "sglang": ["LlamaForCausalLMEagle"]}


def _as_eagle1(values: dict[str, Any], tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    """Both engines read the same names; the embeddings, the head and the state that the draft reads
    are the target's. SGLang's fc has a bias, and all zeros count as none; vLLM's has no bias."""
    state = dict(tensors)
    bias = state.get("fc.bias")
    if values["architectures"] == _EAGLE1_CLASSES["sglang"]:
        require(bias is not None, "fc.bias (in model.safetensors)")
        if bias is not None and not bool(bias.any()):
            del state["fc.bias"]
    else:
        require(bias is None, "fc.bias (in model.safetensors)")
    state |= _target_embeddings(target, state)
    if target.head_VE is not None:
        state["lm_head.weight"] = target.head_VE.to(state["fc.weight"].dtype)
    ids = [] if target.layers is None else [target.layers]
    config = engine_config(values, {}, aux_layer_ids=ids)
    config.num_aux_hidden_states = 1
    config.eagle_version = values.get("eagle_version", 1)
    config.fc_bias = "fc.bias" in state
    return Reread(config, state, [])


def _target_embeddings(target: TargetSide, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target's embeddings in the draft's dtype: an engine runs all weights in one dtype."""
    if target.embeddings_VE is None:
        return {}
    return {"embed_tokens.weight": target.embeddings_VE.to(tensors["fc.weight"].dtype)}


def require(holds: bool, key: str) -> None:
    """Refuse an export whose `key` an engine would misread."""
    if not holds:
        raise BadInput(f"self-check: {key} is not what the engine must read", where="config.json")


def _layer_outputs(ids: list[int] | None, layers: int | None) -> list[int]:
    """Outputs of layers, from ids that count the layers before a state; sorted, as in vLLM."""
    return _default_layers(layers) if ids is None else sorted({i - 1 for i in ids})


def _default_layers(layers: int | None) -> list[int]:
    if layers is None:
        raise BadInput("no aux layers in the exported file, and no target to derive them from")
    return [1, layers // 2 - 1, layers - 4]


def engine_config(
    llama: Mapping[str, Any],
    outer: Mapping[str, Any],
    *,
    aux_layer_ids: list[int],
    parallel: bool = False,
    mask_token_id: int | None = None,
) -> LlamaConfig:
    """The config in our own keys; absent flags are off, as in the engines."""
    rope = dict(llama.get("rope_parameters") or llama.get("rope_scaling") or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", llama.get("rope_theta", 10000.0))
    hidden = llama["hidden_size"]
    return LlamaConfig(
        **{name: llama[name] for name in _LLAMA if name in llama},
        rope_parameters=rope,
        rope_theta=rope["rope_theta"],
        tie_word_embeddings=False,
        draft_vocab_size=outer.get("draft_vocab_size", llama["vocab_size"]),
        target_hidden_size=outer.get("target_hidden_size") or hidden,
        num_aux_hidden_states=len(aux_layer_ids),
        fc_norm=bool(outer.get("fc_norm", False)),
        norm_output=bool(outer.get("norm_output", False)),
        parallel_drafting=parallel,
        mask_token_id=mask_token_id,
        aux_layer_ids=aux_layer_ids,
        qk_norm=False,
        attention_bias=bool(llama.get("attention_bias", False)),
        mlp_bias=bool(llama.get("mlp_bias", False)),
    )


def differing_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """`name: what is wrong` for every tensor that is not bit for bit the same."""
    faults = [f"{name}: missing" for name in sorted(ours.keys() - theirs.keys())]
    faults += [f"{name}: not ours" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        expected, actual = ours[name], theirs[name]
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            faults.append(
                f"{name}: {actual.dtype} {tuple(actual.shape)}, "
                f"not {expected.dtype} {tuple(expected.shape)}"
            )
        elif not torch.equal(expected, actual):
            faults.append(f"{name}: other values")
    return faults


_COMPARED = (
    "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "num_aux_hidden_states", "fc_norm", "norm_output",
    "parallel_drafting", "mask_token_id", "aux_layer_ids", "eagle_version",
    "attention_bias", "mlp_bias", "qk_norm",
    "block_size", "sample_from_anchor", "causal", "sliding_window", "sliding_layers",
    "markov_rank", "confidence_head",
)  # fmt: skip


def differing_flags(ours: Any, theirs: Any) -> list[str]:
    """`name: ours -> theirs` for every setting that decides what the draft computes.

    Rotary settings are compared by the frequencies that they result in.
    """
    faults = [
        f"{name}: {getattr(ours, name, None)} -> {getattr(theirs, name, None)}"
        for name in _COMPARED
        if getattr(ours, name, None) != getattr(theirs, name, None)
    ]
    (own, own_scale), (their, their_scale) = rotary_frequencies(ours), rotary_frequencies(theirs)
    if own.shape != their.shape or not torch.equal(own, their) or own_scale != their_scale:
        faults.append("rotary positions: other angles")
    return faults
