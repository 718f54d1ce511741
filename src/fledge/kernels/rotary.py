# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rotary positions: one GPU kernel for the forward pass, one for the backward pass.

Same results as `rotary.rotate`, which launches half a dozen kernels and rounds to bf16 in between;
here everything is fp32 until it is stored. Importing this file imports Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of


@triton.jit(do_not_specialize=["num_pairs"])
def _rotate_pairs(
    x, cos, sin, out, x_row, x_head, num_pairs,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, HALF: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate (BACK: rotate back) channels i and i + HALF of BLOCK (row, head) pairs."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = pair // HEADS, pair % HEADS
    c = tl.arange(0, BLOCK_C)
    live = (pair < num_pairs)[:, None] & (c < HALF)[None, :]
    source = x + (row * x_row + head * x_head)[:, None] + c[None, :]
    target = out + (pair * CHANNELS)[:, None] + c[None, :]
    angle = (row * (2 * HALF))[:, None] + c[None, :]
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + angle, mask=live, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=live, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=live, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=live, other=0.0).to(tl.float32)
    if BACK:
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
    tl.store(target, new_low.to(out.dtype.element_ty), mask=live)
    tl.store(target + HALF, new_high.to(out.dtype.element_ty), mask=live)
    for kept in tl.static_range(2 * HALF, CHANNELS, BLOCK_C):  # channels that are not rotated
        rest = (pair < num_pairs)[:, None] & (kept + c < CHANNELS)[None, :]
        tl.store(target + kept, tl.load(source + kept, mask=rest), mask=rest)


def _rotate(x_NHC: Tensor, cos_NC: Tensor, sin_NC: Tensor, *, back: bool) -> Tensor:
    x_NHC = x_NHC if x_NHC.stride(-1) == 1 else x_NHC.contiguous()
    rows, heads, channels = x_NHC.shape
    half = cos_NC.shape[-1] // 2
    out_NHC = x_NHC.new_empty(x_NHC.shape)
    block_c = triton.next_power_of_2(half)
    block = max(1, 2048 // block_c)
    if rows:
        with on_device_of(x_NHC):
            _rotate_pairs[(triton.cdiv(rows * heads, block),)](
                x_NHC, cos_NC, sin_NC, out_NHC, *x_NHC.stride()[:2], rows * heads,
                HEADS=heads, CHANNELS=channels, HALF=half, BLOCK_C=block_c, BLOCK=block, BACK=back,
            )  # fmt: skip
    return out_NHC


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHC: Tensor, cos_NC: Tensor, sin_NC: Tensor) -> Tensor:
        ctx.save_for_backward(cos_NC, sin_NC)
        return _rotate(x_NHC, cos_NC, sin_NC, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grads[0], *ctx.saved_tensors, back=True), None, None


def fused_rotate(x_NHC: Tensor, cos_NC: Tensor, sin_NC: Tensor) -> Tensor:
    """`rotary.rotate` on a GPU; cos and sin get no gradient."""
    out: Tensor = _Rotate.apply(x_NHC, cos_NC.contiguous(), sin_NC.contiguous())
    return out
