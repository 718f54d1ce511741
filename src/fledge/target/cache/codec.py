"""Encodes a target's answer as the tensors that the cache stores, and decodes them again.

Probabilities come from `target_distribution`, the function that the trainer itself calls, so a
cached answer equals the live one. Everything here runs on the device of the batch.
"""

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.target.cache.format import CacheShape
from fledge.target.finite import by_layer, finite_rows

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_FP16_TOO_SMALL_BY = 2.0**8  # see `_scaled_down_fp16`
_CPU_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 24  # values decoded at once


@torch.no_grad()
def to_fp8(states_ND: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """8-bit floats [N, D] and their scales [N, chunks]: each chunk's largest magnitude becomes 448.

    There is one scale per token and layer, because tokens differ by orders of magnitude (above all
    the first one of a row); the exponent bits cover the differences between channels.
    """
    grouped_NCX = states_ND.float().reshape(len(states_ND), chunks, states_ND.shape[-1] // chunks)
    scale_NC = grouped_NCX.abs().amax(-1) / _FP8_MAX
    scale_NC = torch.where(scale_NC == 0, 1.0, scale_NC)  # NaN stays: `unsound` detects it
    # with a subnormal scale the quotient can round past the largest value: clamp before the cast
    scaled_NCX = (grouped_NCX / scale_NC[..., None]).clamp(-_FP8_MAX, _FP8_MAX)
    return scaled_NCX.flatten(-2).to(_FP8), scale_NC


@torch.no_grad()
def from_fp8(states_ND: Tensor, scale_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `to_fp8`: each value times its chunk's scale in float32, rounded once. Works
    in blocks of rows, so that intermediates fit a CPU's cache and stay small on a GPU."""
    (rows, chunks), width = scale_NC.shape, states_ND.shape[-1]
    shape_NCX = (rows, chunks, width // chunks)
    states_NCX, scale_NC1 = states_ND.view(shape_NCX), scale_NC[..., None]
    if on_cpu := states_ND.device.type == "cpu":
        scale_NC1 = scale_NC1 * _FP16_TOO_SMALL_BY
    out_NCX = torch.empty(shape_NCX, dtype=dtype, device=states_ND.device)
    block = max(1, (_CPU_BLOCK if on_cpu else _GPU_BLOCK) // width)
    for begin in range(0, rows, block):
        part = states_NCX[begin : begin + block]
        fp16 = _scaled_down_fp16(part) if on_cpu else part.to(torch.float16)
        out_NCX[begin : begin + block] = fp16.float().mul_(scale_NC1[begin : begin + block])
    return out_NCX.flatten(1)


def _scaled_down_fp16(states: Tensor) -> Tensor:
    """e4m3 -> float16, too small by a factor of 2^8; on a CPU eight times as fast as torch's cast.

    Sign, exponent and mantissa are moved to their positions in a float16. This preserves the value,
    also of subnormal numbers, except that the exponent is off by the difference of the biases,
    15 - 7. (NaN is not preserved, but it is never written.) Making up for the factor in the scale
    is exact, since no scale exceeds 2^120.

        e4m3       s eeee mmm
        extended   ssss ssss seee emmm     int16
        shifted    ssee eemm m000 0000     << 7
        float16    s0ee eemm m000 0000     & ~0x4000
    """
    bits = states.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~0x4000).view(torch.float16)


@torch.no_grad()
def unsound(stored: dict[str, Tensor], shape: CacheShape) -> tuple[Tensor, Tensor]:
    """bool [N, A] and [M]: which aux layers of which tokens, and which supervised slots, are stored
    with a value that is not finite."""
    aux_NAD = by_layer(stored["aux_hidden_states"], shape.aux_layers)
    if shape.encoding == "hidden-fp8":
        bad_NA = ~stored["aux_scale"].isfinite() | _fp8_nan(aux_NAD)
        bad_M = ~stored["last_scale"][:, 0].isfinite() | _fp8_nan(stored["last_hidden_states"])
        return bad_NA, bad_M
    names = {"hidden": "last_hidden_states", "probs": "target_probs", "topk": "topk_probs"}
    return ~finite_rows(aux_NAD), ~finite_rows(stored[names[shape.encoding]])


def _fp8_nan(states: Tensor) -> Tensor:
    """[..., D] -> [...]: whether any 8-bit float is NaN, i.e. has all bits but the sign set."""
    return ((states.view(torch.uint8) & 0x7F) == 0x7F).any(-1)


@torch.no_grad()
def keep_top(probs_NW: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k largest probabilities [N, K], renormalized, and their draft ids."""
    top_NK, ids_NK = probs_NW.float().topk(top_k, dim=-1)
    total_N1 = top_NK.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return top_NK / total_N1, ids_NK


@torch.no_grad()
def encode_rows(
    batch: Eagle3TargetBatch,
    shape: CacheShape,
    lengths: list[int],
    slots: list[Tensor],
    *,
    head: TargetHead | None = None,
    vocabulary: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The payload of a batch with one document per row, rows end to end: name -> [N or M, ...].
    `lengths` are the token counts of the rows, `slots` their slots whose supervision is kept."""
    width = batch.input_ids.shape[1]
    token_N = torch.cat([row * width + torch.arange(n) for row, n in enumerate(lengths)])
    slot_M = torch.cat([row * width + slot for row, slot in enumerate(slots)])
    device = batch.aux_hidden_states.device
    token_N, slot_M = token_N.to(device), slot_M.to(device)
    aux_ND = batch.aux_hidden_states.flatten(0, 1)[token_N]
    if shape.is_hidden:
        if batch.last_hidden_states is None:
            raise ValueError(
                f"the {shape.encoding} encoding keeps last_hidden_states, the batch carries "
                f"{batch.supervision}: build the target with supervision='hidden'"
            )
        hidden_MD = batch.last_hidden_states.flatten(0, 1)[slot_M]
        if shape.encoding == "hidden":
            aux_ND, hidden_MD = aux_ND.to(shape.dtype), hidden_MD.to(shape.dtype)
            return {"aux_hidden_states": aux_ND, "last_hidden_states": hidden_MD}
        aux8_ND, aux_scale = to_fp8(aux_ND, shape.aux_layers)
        hidden8_MD, last_scale = to_fp8(hidden_MD, 1)
        return {
            "aux_hidden_states": aux8_ND,
            "aux_scale": aux_scale,
            "last_hidden_states": hidden8_MD,
            "last_scale": last_scale,
        }
    if batch.target_probs is None:
        assert vocabulary is not None, "probabilities are over a draft vocabulary"
        batch = batch.with_probs(head, *vocabulary)
    assert batch.target_probs is not None
    assert batch.position_mask is not None
    probs_MW = batch.target_probs.flatten(0, 1)[slot_M]
    position_M1 = batch.position_mask.flatten(0, 1)[slot_M]
    top_k = shape.top_k if shape.encoding == "topk" else None
    supervision = encode_probs(probs_MW, position_M1, shape.dtype, top_k)
    return {"aux_hidden_states": aux_ND.to(shape.dtype), **supervision}


def encode_probs(
    probs_MW: Tensor, sayable_M1: Tensor, dtype: torch.dtype, top_k: int | None
) -> dict[str, Tensor]:
    """The stored form of probabilities: the `top_k` largest, or all of them."""
    mask = {"position_mask": sayable_M1.to(torch.uint8)}
    if top_k is None:
        return {**mask, "target_probs": probs_MW.to(dtype)}
    top_MK, ids_MK = keep_top(probs_MW, top_k)
    return {**mask, "topk_probs": top_MK.to(dtype), "topk_ids": ids_MK.to(torch.int32)}


@torch.no_grad()
def decode_states(
    stored: dict[str, Tensor], shape: CacheShape, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Decode stored tensors [S, ...] of any S slots to the fields of a batch, still flat."""
    aux_SD = stored["aux_hidden_states"]
    if shape.is_hidden:
        hidden_SD = stored["last_hidden_states"]
        if shape.encoding == "hidden-fp8":
            aux_SD = from_fp8(aux_SD, stored["aux_scale"], dtype)
            hidden_SD = from_fp8(hidden_SD, stored["last_scale"], dtype)
        return {"aux_hidden_states": aux_SD, "last_hidden_states": hidden_SD}
    if shape.encoding == "probs":
        probs_SW = stored["target_probs"].float()
    else:
        top_SK = stored["topk_probs"].float()
        probs_SW = top_SK.new_zeros((len(top_SK), shape.draft_vocab_size))
        probs_SW.scatter_add_(1, stored["topk_ids"].long(), top_SK)
    return {
        "aux_hidden_states": aux_SD,
        "target_probs": probs_SW,
        "position_mask": stored["position_mask"] != 0,
    }
