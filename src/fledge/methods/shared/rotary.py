"""Rotary positions of the draft: the target's own frequencies, applied as in Llama.

Positions that the draft cannot represent are refused, with the reason: a draft trained with
positions other than those in serving looks healthy in training, but none of its tokens is accepted.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fledge.core.errors import BadInput
from fledge.core.reading import Flag, Maybe, Number, Table, Text, Whole
from fledge.kernels.gate import kernel_runs
from fledge.methods.base import stated
from fledge.methods.shared.norms import rms_norm

# These depend only on the position. `dynamic` and `longrope` depend on the sequence length as well,
# so a packed row and a served request would be rotated differently from the padded row.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# The rotary settings that config.json may contain, all of which a draft takes over unchanged.
ROTARY = Table(
    optional={
        "rope_type": Text(64),
        "type": Text(64),
        "truncate": Maybe(Flag()),
        "original_max_position_embeddings": Maybe(Whole(1)),
        "partial_rotary_factor": Maybe(Number(1e-6, 1)),
        "rope_theta": Maybe(Number(1e-30, 1e30)),
        **dict.fromkeys(
            ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast",
             "beta_slow", "mscale", "mscale_all_dim"), Maybe(Number(-1e30, 1e30)),
        ),
    }
)  # fmt: skip


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The config's rotary settings as one flat dict, with the keys of transformers 5."""
    parameters = dict(stated(config, "rope_parameters") or stated(config, "rope_scaling") or {})
    if "rope_type" not in parameters:
        parameters["rope_type"] = parameters.pop("type", "default")
    if "rope_theta" not in parameters:
        parameters["rope_theta"] = stated(config, "rope_theta") or 10000.0
    factor = stated(config, "partial_rotary_factor")
    if factor is not None:
        parameters.setdefault("partial_rotary_factor", factor)
    return parameters


def rotary_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (fp32, half as many as rotated channels) and the scale of cos and sin."""
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind not in STATIC_ROPE_TYPES:
        raise ValueError(f"rope_type: {kind!r} is not one of {', '.join(STATIC_ROPE_TYPES)}")
    if kind != "default":
        compatible = _in_both_spellings(config, parameters)
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](compatible, torch.device("cpu"))
        return inv_freq.float(), float(scale)
    channels = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return 1.0 / parameters["rope_theta"] ** exponent, 1.0


def _in_both_spellings(config: PretrainedConfig, parameters: dict[str, Any]) -> PretrainedConfig:
    """A copy that transformers 4 and 5 read in the same way, whichever wrote the config."""
    compatible = copy.copy(config)
    compatible.rope_parameters = parameters
    if not hasattr(compatible, "standardize_rope_params"):  # transformers 4
        compatible.rope_scaling, compatible.rope_theta = parameters, parameters["rope_theta"]
        compatible.partial_rotary_factor = parameters.get("partial_rotary_factor", 1.0)
    return compatible


class Rotary:
    """cos and sin for positions. Not a module: casting the draft to bf16 must not touch it."""

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("cpu"):  # even if the draft is built only for its shapes (on "meta")
            self.inv_freq, self.scale = rotary_frequencies(config)

    def __call__(self, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[T, rotated channels] each, computed in fp32; both halves carry the same angles."""
        if self.inv_freq.device != position_T.device:
            self.inv_freq = self.inv_freq.to(position_T.device)
        angle = position_T.float()[:, None] * self.inv_freq
        angle = torch.cat([angle, angle], dim=-1)
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(x_NHC: Tensor, cos_NC: Tensor, sin_NC: Tensor) -> Tensor:
    """Rotate channel i with channel i + half; channels beyond the rotated ones pass through."""
    if kernel_runs(x_NHC, what="rotary positions"):
        from fledge.kernels.elementwise import fused_rotate

        return fused_rotate(x_NHC, cos_NC, sin_NC)
    channels = cos_NC.shape[-1]
    rotary, rest = x_NHC[..., :channels], x_NHC[..., channels:]
    low, high = rotary.chunk(2, dim=-1)
    out = rotary * cos_NC[:, None] + torch.cat([-high, low], dim=-1) * sin_NC[:, None]
    return out if rest.shape[-1] == 0 else torch.cat([out, rest], dim=-1)


# --- attention heads -----------------------------------------------------------------------------
# From a layer's projection to queries, keys and values: split into heads, normed, rotated.


Turn = tuple[Tensor, Tensor]  # cos and sin, [N, rotated channels] each


def split_heads(
    x_NX: Tensor,  # H query heads, G key heads, G value heads, C channels each
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    turn: Turn,
    *,
    eps: float,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, H, C] and keys [N, G, C], normed per head and rotated, and values [N, G, C]. For
    context without queries, H is 0."""
    channels = len(k_norm_C)
    if kernel_runs(x_NX, what="heads") and turn[0].shape[-1] == channels:
        from fledge.kernels.elementwise import fused_heads

        return fused_heads(x_NX, q_norm_C, k_norm_C, *turn, eps, groups)
    heads_NHC = x_NX.reshape(len(x_NX), x_NX.shape[1] // channels, channels)
    count = heads_NHC.shape[1] - 2 * groups
    q, k, v = torch.split(heads_NHC, [count, groups, groups], dim=1)
    q, k = rms_norm(q, q_norm_C, eps), rms_norm(k, k_norm_C, eps)
    return rotate(q, *turn), rotate(k, *turn), v


# --- from the target ------------------------------------------------------------------------------

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


_ROTARY_MODULE = r"((?!.*vis).*\.)?rotary_emb"  # vision towers have their own


def draft_rope(text: PretrainedConfig, rope_layers: str | None, name: str) -> dict[str, Any]:
    """The target's rotary settings, if a Llama-style draft can rotate positions the same way."""

    def refuse(why: str) -> BadInput:
        return BadInput(f"no draft can be derived: {why}", where=name, fix="use another target")

    parameters = stated(text, "rope_parameters") or stated(text, "rope_scaling")
    has_none = not parameters and stated(text, "rope_theta") is None
    if stated(text, "alibi") or has_none:
        raise refuse("it has no rotary positions (ALiBi, absolute or learned ones)")
    rope = rope_parameters(text)
    by_layer = bool(parameters) and all(isinstance(x, Mapping) for x in parameters.values())
    if by_layer:
        first, *others = parameters.values()
        rope = dict(parameters.get(rope_layers, first))
        rope.setdefault("rope_type", rope.get("type", "default"))
        differ = any(other != first for other in others)
    else:
        differ = stated(text, "rope_local_base_freq") is not None  # transformers 4's Gemma-3
    if differ and (rope_layers is None or (by_layer and rope_layers not in parameters)):
        raise refuse("its layers rotate differently and the registry does not say whose to take")
    kind = rope["rope_type"]
    if rope.get("mrope_section") is not None or kind == "mrope":
        raise refuse("it has multi-axis rotary positions (MRoPE)")
    if kind not in STATIC_ROPE_TYPES:
        raise refuse(
            f"its rotary scaling {kind!r} depends on the sequence's length, or has no Llama form"
        )
    rope = {key: value for key, value in rope.items() if value is not None and key != "type"}
    if unknown := sorted(set(rope) - set(ROTARY.optional)):
        raise refuse(f"unknown rotary settings {', '.join(unknown)}")
    return rope


@torch.no_grad()
def verify_rotary(draft_config: PretrainedConfig, target: nn.Module) -> None:
    """Refuse a draft whose cos and sin differ from those of the target's rotary module, at any of
    the positions up to the target's maximum. The tolerance grows with the angle, because fp32
    angles are rounded: at angle a, by about a * 2**-24."""
    name = type(target).__name__
    found = (x for path, x in target.named_modules() if re.fullmatch(_ROTARY_MODULE, path))
    rotary = next(found, None)
    if rotary is None:
        what = "no rotary module (rotary_emb) in the target"
        raise BadInput(what, where=name, fix="its positions cannot be checked: use another target")
    last = draft_config.max_position_embeddings - 1
    position_T = torch.unique(torch.linspace(0, last, 257).round().long())
    draft = Rotary(draft_config)
    half = len(draft.inv_freq)
    allowed = 1e-5 + position_T[:, None].double() * draft.inv_freq.double() * 2**-22
    tables = _target_tables(rotary, position_T, ROPE_LAYERS.get(name))
    for ours, theirs in zip(draft(position_T, torch.float32), tables, strict=True):
        # a table has two copies of every angle, in halves or interleaved, or (gpt-oss) one
        copies = [theirs[:, :half], theirs[:, ::2]]
        gaps = [(ours[:, :half] - x).abs() for x in copies if x.shape[1] == half]
        if theirs.shape[1] not in (half, 2 * half) or not any((g <= allowed).all() for g in gaps):
            raise BadInput(
                f"the draft's rotary positions differ from the target's (up to position {last})",
                where=name,
                fix="the draft's config cannot represent this target's positions",
            )


def _target_tables(rotary: nn.Module, position_T: Tensor, layers: str | None) -> list[Tensor]:
    device = next(rotary.buffers()).device
    place: Tensor = position_T[None].to(device)
    if hasattr(rotary, "mrope_section"):  # positions on three axes, all alike in text
        place = place.expand(3, 1, -1)
    args: tuple[Any, ...] = (torch.zeros(1, device=device), place)
    kinds = getattr(rotary, "rope_type", None)
    if isinstance(kinds, dict):  # one set of frequencies per layer type
        args += (layers or next(iter(kinds)),)
    return [table[0].double().cpu() for table in rotary(*args)]
