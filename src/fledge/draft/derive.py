"""Derive a draft's config from its target's, and verify that both rotate positions the same way.

Positions that the draft cannot represent are refused here, with the reason: a draft trained with
positions other than those in serving looks healthy in training, but none of its tokens is accepted.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.draft.config import check_draft_config
from fledge.draft.rotary import STATIC_ROPE_TYPES, Rotary, rope_parameters

# Rotary settings that a Llama-style draft takes over unchanged.
_ROPE_KEYS = {
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip

# The layer type whose rotary settings a draft takes if they differ between types: the global
# layers, because the draft attends to everything too. Gemma 4's global layers rotate a quarter of
# wider heads in a way that no engine supports in drafts, so there it is the local layers. Other
# architectures need no entry: their config is unambiguous.
ROPE_LAYERS = {
    "Gemma3ForCausalLM": "full_attention",
    "Gemma3ForConditionalGeneration": "full_attention",
    "Gemma4ForCausalLM": "sliding_attention",
    "Gemma4ForConditionalGeneration": "sliding_attention",
}


def derive_draft_config(
    target_config: Any,
    *,
    architecture: str | None = None,
    draft_vocab_size: int | None = None,
    num_hidden_layers: int = 1,
    intermediate_size: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    **settings: Any,
) -> LlamaConfig:
    """The config of a draft that fits this target: same width, heads, norm and rotary positions.

    `architecture` is the target's class name, for configs that do not name it (a model in memory).
    `settings` are those of the method (`Method.draft_settings`).
    """
    text = getattr(target_config, "text_config", None) or target_config
    class_name = architecture or (getattr(target_config, "architectures", None) or [None])[0]
    name = class_name or type(target_config).__name__
    rope_layers = ROPE_LAYERS.get(class_name or "")
    rope = _draft_rope(text, rope_layers, name)
    layer = _layer_config(text, rope_layers)
    _check_fields(text, name)
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size
        or _get(layer, "intermediate_size", 4 * text.hidden_size),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=_get(layer, "num_key_value_heads", layer.num_attention_heads),
        head_dim=_get(layer, "head_dim", text.hidden_size // layer.num_attention_heads),
        rms_norm_eps=_get(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope,
        bos_token_id=_get(text, "bos_token_id", None),
        eos_token_id=_get(text, "eos_token_id", None),
        pad_token_id=_get(text, "pad_token_id", None),
        tie_word_embeddings=False,
        draft_vocab_size=draft_vocab_size or text.vocab_size,
        target_hidden_size=text.hidden_size,
        fc_norm=fc_norm,
        norm_output=norm_output,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        **settings,
    )
    check_draft_config(config)
    return config


def _layer_config(text: Any, kind: str | None) -> Any:
    """The config of a layer of this kind, if kinds differ in more than rotary (Gemma 4)."""
    layers, kinds = getattr(text, "per_layer_config", None), getattr(text, "layer_types", None)
    if not layers or kind is None or kinds is None or kind not in kinds:
        return text
    return layers[list(kinds).index(kind)]


def _check_fields(text: Any, name: str) -> None:
    needed = ["vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"]
    missing = [field for field in needed if getattr(text, field, None) is None]
    if missing:
        raise BadInput(
            f"no draft can be derived: its config lacks {', '.join(missing)}",
            where=name,
            fix="give the draft's config by hand",
        )


def _get(config: Any, name: str, default: Any) -> Any:
    """An attribute of a config; `default` if it is missing or None."""
    value = getattr(config, name, None)
    return default if value is None else value


def _draft_rope(text: Any, rope_layers: str | None, name: str) -> dict[str, Any]:
    """The target's rotary settings, if a Llama-style draft can rotate positions the same way."""

    def refuse(why: str) -> BadInput:
        return BadInput(f"no draft can be derived: {why}", where=name, fix="use another target")

    if getattr(text, "alibi", False):
        raise refuse("its positions are ALiBi, not rotary")
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not parameters and getattr(text, "rope_theta", None) is None:
        raise refuse("it has no rotary positions (absolute or learned ones)")
    local_theta = getattr(text, "rope_local_base_freq", None)  # transformers 4's Gemma-3
    if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
        rope = dict(_layer_type_rope(parameters, rope_layers, refuse))
    elif local_theta is not None and rope_layers is None:
        raise refuse("its layers rotate differently and the registry does not say whose to take")
    else:
        rope = rope_parameters(text)
    if "rope_type" not in rope:
        rope["rope_type"] = rope.pop("type", "default")
    kind = rope["rope_type"]
    if rope.get("mrope_section") is not None or kind == "mrope":
        raise refuse("it has multi-axis rotary positions (MRoPE)")
    if kind not in STATIC_ROPE_TYPES:
        raise refuse(
            f"its rotary scaling {kind!r} depends on the sequence's length, or has no Llama form"
        )
    rope = {key: value for key, value in rope.items() if value is not None}
    if unknown := sorted(set(rope) - _ROPE_KEYS - {"type"}):
        raise refuse(f"unknown rotary settings {', '.join(unknown)}")
    rope.pop("type", None)
    return rope


def _layer_type_rope(parameters: Mapping[str, Any], rope_layers: str | None, refuse: Any) -> Any:
    """The settings of one layer type, from settings by layer type."""
    if rope_layers is not None and rope_layers in parameters:
        return parameters[rope_layers]
    first, *others = parameters.values()
    if any(other != first for other in others):
        raise refuse(
            f"its layers rotate differently ({', '.join(parameters)}) "
            "and the registry does not say whose to take"
        )
    return first


# --- verification ------------------------------------------------------------------------------


def verify_rotary(
    draft_config: Any, target: nn.Module, *, max_position: int | None = None
) -> float:
    """Compare the draft's cos and sin with those of the target's rotary module; returns the largest
    difference.

    Positions run from 0 to the target's maximum (or `max_position`). The tolerance grows with the
    angle, because fp32 angles are rounded: at angle a, by about a * 2**-24.
    """
    name, rotary = _rotary_module(target)
    last = (max_position or draft_config.max_position_embeddings) - 1
    steps = torch.linspace(0, last, 257).round().long()
    position_T = torch.unique(torch.cat([torch.arange(min(last + 1, 64)), steps]))
    draft = Rotary(draft_config)
    cos_sin = _target_cos_sin(rotary, position_T, ROPE_LAYERS.get(type(target).__name__))
    angle = position_T[:, None].double() * torch.cat([draft.inv_freq, draft.inv_freq]).double()
    allowed = 1e-5 + angle * 2**-22
    gap = 0.0
    for draft_x, target_x in zip(draft(position_T, torch.float32), cos_sin, strict=True):
        difference = _difference(draft_x.double(), target_x.double())
        if difference is None or bool((difference > allowed).any()):
            raise BadInput(
                f"the draft's rotary positions differ from the target's {name} "
                f"(up to position {last})",
                where=type(target).__name__,
                fix="the draft's config cannot represent this target's positions",
            )
        gap = max(gap, float(difference.max()))
    return gap


def _difference(draft_x: Tensor, target_x: Tensor) -> Tensor | None:
    """The absolute difference per angle; None if the shapes differ. Some targets interleave the two
    copies of an angle instead of storing them in halves."""
    half = draft_x.shape[-1] // 2
    if target_x.shape[-1] == half:  # one copy only (gpt-oss)
        target_x = torch.cat([target_x, target_x], dim=-1)
    if target_x.shape != draft_x.shape:
        return None
    interleaved = torch.cat([target_x[:, ::2], target_x[:, 1::2]], dim=-1)
    halves, pairs = (draft_x - target_x).abs(), (draft_x - interleaved).abs()
    return halves if halves.max() <= pairs.max() else pairs


def _rotary_module(target: nn.Module) -> tuple[str, nn.Module]:
    """The language model's rotary module (vision towers have their own)."""
    for name, module in target.named_modules():
        parts = name.split(".")
        if parts[-1] == "rotary_emb" and not any("vis" in part for part in parts):
            return name, module
    raise BadInput(
        "no rotary module (rotary_emb) in the target",
        where=type(target).__name__,
        fix="its positions cannot be checked, so no draft is derived from it",
    )


@torch.no_grad()
def _target_cos_sin(
    rotary: nn.Module, position_T: Tensor, rope_layers: str | None
) -> tuple[Tensor, Tensor]:
    buffer = next(rotary.buffers())
    x = torch.zeros(1, dtype=torch.float32, device=buffer.device)
    args: tuple[Any, ...] = (x, position_T[None].to(buffer.device))
    kinds = getattr(rotary, "rope_type", None)
    if isinstance(kinds, dict):  # one set of frequencies per layer type
        args += (rope_layers or next(iter(kinds)),)
    cos, sin = rotary(*args)
    return cos[0].cpu(), sin[0].cpu()
