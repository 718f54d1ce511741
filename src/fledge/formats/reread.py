"""Read an export back the way its engine reads it. Deliberately without `codec.py`: an error there
must not confirm itself, so this module implements the formats independently.

Each reader does what the engine's loader does, including what it does silently (SGLang skips names
that it does not know and takes the target's embeddings; vLLM and SGLang fall back to default aux
layers), and returns a draft of ours. Any difference from the exported draft is then a fault.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from fledge.core.errors import BadInput
from fledge.core.reading import load_tensors, read_json
from fledge.formats.reread_gguf import read_gguf
from fledge.methods.registry import method_of
from fledge.methods.shared.config import EAGLE3_FLAGS
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.rotary import rotary_frequencies

_LLAMA = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "initializer_range", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
_EAGLE1_CLASSES = {"vllm": ["EagleLlamaForCausalLM"], "sglang": ["LlamaForCausalLMEagle"]}
_BLOCK_CLASSES = {
    "DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark", "DFlash2DraftModel": "dflash2",
    "LiLiCorrDraftModel": "lilicorr", "Qwen3XPressModel": "xpress",
}  # fmt: skip
# Settings of a decoder or of an untrained draft, which no engine reads from the files.
_UNREAD = {"confidence_threshold", "confidence_temperatures", "initializer_range"}
_ALSO_COMPARED = {"max_position_embeddings", "aux_layer_ids", "eagle_version"}
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Reread:
    """The draft as an engine reads it from the files."""

    config: LlamaConfig
    tensors: dict[str, Tensor]  # under our names
    unread: list[str]  # names in the file that the engine skips

    def model(self) -> DraftModel:
        draft_type = method_of(self.config).draft_type()
        state = without_head(self.config, self.tensors)
        return draft_type.from_tensors(self.config, state, where=Path("the export"))


def without_head(config: PretrainedConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, but for a head that is the target's."""
    is_block = getattr(config, "block_size", None)
    return {name: t for name, t in tensors.items() if not (is_block and name == "lm_head.weight")}


@dataclass(frozen=True)
class TargetSide:
    """What an engine takes from the target instead of the files."""

    layers: int | None
    embeddings_VE: Tensor | None = None
    head_VE: Tensor | None = None


def reread(directory: Path, engine: str, target: TargetSide) -> Reread:
    """The draft that `engine` would serve from these files."""
    if engine == "llama.cpp":
        return _as_gguf(directory, target)
    values = read_json(directory / "config.json", what="the export's config")
    tensors: dict[str, Tensor] = load_tensors(directory / "model.safetensors", what="the export")
    named, kind = values.get("architectures") or [""], values.get("speculators_model_type")
    if kind not in ("dflash", "dspark", "dflash2", "xpress"):
        kind = _BLOCK_CLASSES.get(named[0])
    if (values.get("dflash_config") or {}).get("projector_type") == "domino":
        kind = "domino"
    if kind is not None:
        return _as_block(kind, values, tensors, engine, target)
    if named == _EAGLE1_CLASSES.get(engine):
        return _as_eagle1(values, tensors, target)
    if named == ["MiMoForCausalLM"]:
        return _as_mimo(values, tensors, target)
    readers = {"vllm": _as_vllm, "sglang": _as_sglang, "speculators": _as_speculators}
    return readers[engine](values, tensors, target)


def require(holds: bool, key: str) -> None:
    """Refuse an export whose `key` an engine would misread."""
    if not holds:
        raise BadInput(f"self-check: {key} is not what the engine must read", where="config.json")


def _as_gguf(directory: Path, target: TargetSide) -> Reread:
    values, state, unread = read_gguf(directory / "draft.gguf")
    in_file = "embed_tokens.weight" in state or "block_size" in values
    state |= {} if in_file else _target_embeddings(target, state)
    ids = values.pop("aux_layer_ids")
    require(ids == sorted(set(ids)), "target_layers")
    return Reread(_config(values, values, ids, **values), state, unread)


# --- EAGLE and P-EAGLE ---------------------------------------------------------------------------


def _as_vllm(values: Values, tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    named, has_qk_norms = values["architectures"], values["model_type"] == "qwen3"
    classes = {"qwen3": "Eagle3Qwen3ForCausalLM", "llama": "LlamaForCausalLMEagle3"}
    require(named == [classes.get(values["model_type"])], "architectures")
    require(not values.get("norm_before_residual", False), "norm_before_residual")
    key, nested = "eagle_aux_hidden_state_layer_ids", values.get("eagle_config") or {}
    state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if "mask_hidden" in state:
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    if "embed_tokens.weight" not in state:
        state |= _target_embeddings(target, state)
    config = _config(
        values, values, _layer_outputs(values.get(key) or nested.get(key), target.layers),
        mask_token_id=values.get("mask_token_id"), parallel_drafting="mask_hidden" in state,
        qk_norm=has_qk_norms,
    )  # fmt: skip
    return Reread(config, state, [])


def _as_sglang(values: Values, tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    require(values["architectures"] == ["LlamaForCausalLMEagle3"], "architectures")
    require(not values.get("tie_word_embeddings", False), "tie_word_embeddings")
    require(not values.get("norm_before_residual", False), "norm_before_residual")
    ids = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
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
    ids = _default_layers(target.layers) if ids is None else ids
    return Reread(_config(values, values, ids), state, unread)


def _as_speculators(values: Values, tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    kind = values["speculators_model_type"]
    require(kind in ("eagle3", "peagle"), "speculators_model_type")
    require(_proposed(values) > 0, "speculative_tokens")
    require(not values.get("norm_before_residual", kind == "eagle3"), "norm_before_residual")
    ids = _layer_outputs(values.get("eagle_aux_hidden_state_layer_ids"), target.layers)
    parallel = {"parallel_drafting": True, "mask_token_id": values.get("mask_token_id")}
    own = parallel if kind == "peagle" else {}
    config = _config(values["transformer_layer_config"], values, ids, **own)
    return Reread(config, dict(tensors), [])


def _proposed(values: Values) -> int:
    """The tokens of a round, from the config that speculators has for all its drafts."""
    outer = values["speculators_config"]
    require(outer["algorithm"] == values["speculators_model_type"], "speculators_config.algorithm")
    require("model_type" not in values, "model_type")
    require(bool(outer["verifier"]["name_or_path"]), "verifier")
    [proposal] = outer["proposal_methods"]
    return int(proposal["speculative_tokens"])


def _as_eagle1(values: Values, tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    """Both engines read the same names; the embeddings, the head and the state that the draft reads
    are the target's. SGLang's fc has a bias, and all zeros count as none; vLLM's has no bias."""
    state = dict(tensors)
    with_bias = values["architectures"] == _EAGLE1_CLASSES["sglang"]
    require(("fc.bias" in state) == with_bias, "fc.bias (in model.safetensors)")
    if with_bias and not bool(state["fc.bias"].any()):
        del state["fc.bias"]
    state |= _target_embeddings(target, state)
    if target.head_VE is not None:
        state["lm_head.weight"] = target.head_VE.to(state["fc.weight"].dtype)
    own = {"eagle_version": values.get("eagle_version", 1), "fc_bias": "fc.bias" in state}
    ids = [] if target.layers is None else [target.layers]
    return Reread(_config(values, {}, ids, num_aux_hidden_states=1, **own), state, [])


def _as_mimo(values: Values, tensors: dict[str, Tensor], target: TargetSide) -> Reread:
    """A multi-token head in MiMo's layout: W reads the state first; q, k and v have biases. Without
    any of these tensors engines compute with random numbers."""
    require(values.get("num_nextn_predict_layers") == 1, "num_nextn_predict_layers")
    require(values["model_type"] == "qwen2", "model_type")
    parts = {
        "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm",
        "input_proj": "fc", "final_layernorm": "norm",
    }  # fmt: skip
    state, unread = {}, []
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition("model.mtp_layers.0.")
        if prefix or not rest:
            unread.append(name)
            continue
        part, _, kind = rest.partition(".")
        state[f"{parts[part]}.{kind}" if part in parts else f"layers.0.{rest}"] = tensor
    biases = [f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"]
    require(all(name in state for name in biases), "q, k and v biases (in model.safetensors)")
    biased = any(bool(state[name].any()) for name in biases)
    for name in () if biased else biases:
        del state[name]
    size = values["hidden_size"]
    state["fc.weight"] = torch.cat([state["fc.weight"][:, size:], state["fc.weight"][:, :size]], 1)
    own = {"mtp_family": "mimo", "norm_output": True, "attention_bias": biased}
    ids = values["aux_layer_ids"]
    return Reread(_config(values, {}, ids, num_aux_hidden_states=1, **own), state, unread)


def _target_embeddings(target: TargetSide, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target's embeddings in the draft's dtype: an engine runs all weights in one dtype."""
    if target.embeddings_VE is None:
        return {}
    return {"embed_tokens.weight": target.embeddings_VE.to(tensors["fc.weight"].dtype)}


def _layer_outputs(ids: list[int] | None, layers: int | None) -> list[int]:
    """Outputs of layers, from ids that count the layers before a state; sorted, as in vLLM."""
    return _default_layers(layers) if ids is None else sorted({i - 1 for i in ids})


def _default_layers(layers: int | None) -> list[int]:
    if layers is None:
        raise BadInput("no aux layers in the exported file, and no target to derive them from")
    return [1, layers // 2 - 1, layers - 4]


# --- block drafts --------------------------------------------------------------------------------


def _as_block(
    kind: str, values: Values, tensors: dict[str, Tensor], engine: str, target: TargetSide
) -> Reread:
    """Engines differ in where they look for the layers, the mask token and the attention direction,
    and in what they assume by default."""
    layers: Values = values
    if engine == "speculators":
        layers = values["transformer_layer_config"]
        ids, mask = [i - 1 for i in values["aux_hidden_state_layer_ids"]], values["mask_token_id"]
        # vLLM takes `sliding_window_non_causal: false` to mean that every layer is causal
        causal: bool | None = not values.get("sliding_window_non_causal", True)
        drafted = values["block_size"] - (0 if values.get("sample_from_anchor", False) else 1)
        require(_proposed(values) == drafted, "speculative_tokens")
    else:
        depth = values.get("num_target_layers")
        require(None in (depth, target.layers) or depth == target.layers, "num_target_layers")
        nested, causal = values.get("dflash_config") or {}, values.get("is_causal")
        ids = list(nested.get("target_layer_ids") or values.get("target_layer_ids") or [])
        if engine == "vllm":
            if first := values.get("eagle_aux_hidden_state_layer_ids"):
                ids = [i - 1 for i in first]  # these count the state before layer 0
            causal = nested.get("causal") if causal is None else causal
        require(bool(ids) and ids == sorted(set(ids)), "target_layer_ids")
        mask = nested.get("mask_token_id", values.get("mask_token_id"))
    require(layers.get("model_type") == "qwen3", "model_type")
    prefixes = ["fc.", "hidden_norm.", "norm.", "layers."]
    own: dict[str, Any] = {"markov_rank": 0, "confidence_head": False, "sample_from_anchor": False}
    if kind == "dspark":
        prefixes += ["markov_head.", "confidence_head."]
        own = _markov_heads(values, tensors)
    elif kind != "dflash":
        more, read = _BLOCK_HEADS[kind]
        prefixes += more
        own |= read(values, engine)
    if engine != "sglang":  # which skips what it does not know
        prefixes += ["lm_head.", "d2t", "t2d"]
    config = _config(
        layers, values, ids, mask_token_id=mask, qk_norm=True, causal=bool(causal),
        block_size=values["block_size"], **own, **_sliding(layers, causal),
    )  # fmt: skip
    unread = [name for name in tensors if not name.startswith(tuple(prefixes))]
    ours = {_our_head_name(kind, name): tensor for name, tensor in tensors.items()}
    return Reread(config, ours, unread)


def _convolutions(values: Values) -> dict[str, Any]:
    taps = values.get("conv_kernel_size", 0)
    return {"conv_kernel_size": taps} | (
        {"conv_group_size": values["conv_group_size"]} if taps else {}
    )


def _selector(values: Values, engine: str) -> dict[str, Any]:
    inner = values if engine == "speculators" else values["dflash_config"]
    require(engine == "speculators" or inner["block_size"] == values["block_size"], "block_size")
    own = {"candidate_head": "selector", "selector_rank": inner["selector_rank"]}
    return own | _convolutions(inner) | {"candidates": inner["selector_top_k"]}


def _lattice(values: Values, engine: str) -> dict[str, Any]:
    inner = values["dflash_config"]
    require(inner["lilicorr_enabled"] is True, "lilicorr_enabled")
    sizes = ("hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim", "vector_eps")
    own = {f"lilicorr_{name}": inner[f"lilicorr_{name}"] for name in (*sizes, "logit_scale")}
    own |= {"candidate_head": "lilicorr", "candidates": inner["lilicorr_candidate_topk"]}
    return own | _convolutions(inner)


def _gru(values: Values, engine: str) -> dict[str, Any]:
    inner = values["dflash_config"]
    names = ("gru_hidden_dim", "pure_draft_prefix_len")
    require(all(inner[name] == values[name] for name in ("emb_dim", *names)), "dflash_config")
    own = {"token_head": "domino", "markov_rank": inner["emb_dim"]}
    own |= {name: inner[name] for name in names}
    return own | {"sample_from_anchor": inner["shift_label"]}


def _refiner(values: Values, engine: str) -> dict[str, Any]:
    require(values.get("sample_from_anchor", True) is False, "sample_from_anchor")
    own = {"token_head": "xpress", "markov_rank": values["xpress_rank"]}
    if engine == "speculators":
        require(values["xpress_mlp_ratio"] == 2, "xpress_mlp_ratio")
        return own | {"num_jacobi_passes": values["num_jacobi_passes"]}
    require(values["xpress_mlp_hidden"] == 2 * values["xpress_rank"], "xpress_mlp_hidden")
    require(values["xpress_block_size"] == values["block_size"], "xpress_block_size")
    require(values["xpress_topc"] == 0, "xpress_topc")  # else the best of some tokens only
    return own | {"num_jacobi_passes": values["xpress_num_passes"]}


_BLOCK_HEADS: dict[str, tuple[list[str], Any]] = {
    "dflash2": (["candidate_selector."], _selector),
    "lilicorr": (["lilicorr."], _lattice),
    "domino": (["prefix_gru.", "embed_proj."], _gru),
    "xpress": (["xpress_head.", "refiner_head."], _refiner),
}


def _our_head_name(kind: str, name: str) -> str:
    if kind == "domino" and name.startswith(("prefix_gru.", "embed_proj.")):
        return f"domino_head.{name}"
    if kind != "xpress" or not name.startswith(("xpress_head.", "refiner_head.")):
        return name
    part = name.partition(".")[2].replace("w1.", "token_embed.").replace("w2.", "readout.")
    part = part.replace("mix.L", "mix_l")
    for which in ("gate", "up", "down"):
        part = part.replace(f"mlp.{which}_proj.", f"mlp_{which}.")
    return f"xpress_head.{part}"


def _sliding(layers: Values, causal: bool | None) -> dict[str, Any]:
    """`causal`: whether all layers are causal; None: only the sliding ones are."""
    kinds = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
    require(len(kinds) == layers["num_hidden_layers"], "layer_types")
    sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    require(layers.get("is_neox_style", True) is True, "is_neox_style")
    # without the flag, transformers' Qwen3 drops the window
    require(not sliding or layers.get("use_sliding_window") is True, "use_sliding_window")
    window = layers["sliding_window"] if sliding else None
    both_ways = bool(sliding) and causal is False
    return {"sliding_layers": sliding, "sliding_window": window, "sliding_both_ways": both_ways}


def _markov_heads(values: Values, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    flat = "speculators_model_type" not in values
    require(values.get("markov_head_type", "vanilla") == "vanilla", "markov_head_type")
    # enabled, but not in the file: vLLM serves without it
    enabled = values.get("enable_confidence_head", not flat)
    confidence = bool(enabled and "confidence_head.proj.weight" in tensors)
    reads_both = values.get("confidence_head_with_markov", not flat)
    require(not confidence or reads_both, "confidence_head_with_markov")
    anchor = values.get("sample_from_anchor", flat)
    rank = values["markov_rank"]
    return {"markov_rank": rank, "confidence_head": confidence, "sample_from_anchor": anchor}


# --- in our own terms ----------------------------------------------------------------------------


def _config(llama: Values, outer: Values, aux_layer_ids: list[int], **own: Any) -> LlamaConfig:
    """The config in our own keys; absent flags are off, as in the engines."""
    rope = dict(llama.get("rope_parameters") or llama.get("rope_scaling") or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", llama.get("rope_theta", 10000.0))
    settings = {
        **{name: llama[name] for name in _LLAMA if name in llama},
        **{name: bool(outer.get(name, False)) for name in EAGLE3_FLAGS},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "draft_vocab_size": outer.get("draft_vocab_size", llama["vocab_size"]),
        "target_hidden_size": outer.get("target_hidden_size") or llama["hidden_size"],
        "num_aux_hidden_states": len(aux_layer_ids),
        "norm_before_residual": False,  # or it would have been refused
        "parallel_drafting": False,
        "mask_token_id": None,
        "qk_norm": False,
        "aux_layer_ids": aux_layer_ids,
    }
    return LlamaConfig(**settings | own)


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


def differing_flags(ours: PretrainedConfig, theirs: PretrainedConfig) -> list[str]:
    """`name: ours -> theirs` for every setting that decides what the draft computes.

    Rotary settings are compared by the frequencies that they result in.
    """
    computed_with = fields(method_of(ours).draft_type().config_type)
    defaults = {key.name: None if key.default is MISSING else key.default for key in computed_with}
    names = sorted(defaults.keys() - _UNREAD | _ALSO_COMPARED)

    def stated(config: PretrainedConfig, name: str) -> Any:
        value = vars(config).get(name)
        value = defaults.get(name) if value is None else value
        return list(value) if isinstance(value, tuple) else value

    pairs = {name: (stated(ours, name), stated(theirs, name)) for name in names}
    faults = [f"{name}: {own} -> {their}" for name, (own, their) in pairs.items() if own != their]
    (own, own_scale), (their, their_scale) = rotary_frequencies(ours), rotary_frequencies(theirs)
    if own.shape != their.shape or not torch.equal(own, their) or own_scale != their_scale:
        faults.append("rotary positions: other angles")
    return faults
