# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What a layer computes between its matrix products: rotary positions, the heads of a projection,
SwiGLU. Each is one GPU kernel forward and one backward.

Same results as the torch code of `methods/shared` (`rotate`, `split_heads`, `_GatedMlp`), which
launches many kernels and rounds to bf16 in between; here everything is fp32 until it is stored.
Importing this file imports Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of


@triton.jit
def _rotated(low, high, cos, sin, row, c, live, HALF: tl.constexpr, BACK: tl.constexpr):
    """A row's lower and upper channels, rotated (BACK: rotated back)."""
    angle = (row * (2 * HALF))[:, None] + c[None, :]
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
    return new_low, new_high


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
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    low, high = _rotated(low, high, cos, sin, row, c, live, HALF, BACK)
    tl.store(target, low.to(out.dtype.element_ty), mask=live)
    tl.store(target + HALF, high.to(out.dtype.element_ty), mask=live)
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


# --- swiglu --------------------------------------------------------------------------------------
# Torch reads or writes the widest activations of a step nineteen times, these kernels nine times.


@triton.jit
def _piece_of_row(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a program's elements, and which of them exist. The width is a compile-time
    constant: only then can the compiler prove that adjacent lanes are live together, and vectorize
    their loads."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64) * WIDTH + column, column < WIDTH


@triton.jit
def _gate_forward(gate, up, gated, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, live = _piece_of_row(WIDTH, BLOCK)
    g = tl.load(gate + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=live, other=0.0).to(tl.float32)
    tl.store(gated + i, (g * tl.sigmoid(g) * u).to(gated.dtype.element_ty), mask=live)


@triton.jit
def _gate_backward(gate, up, dgated, gated, dgate, dup, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, live = _piece_of_row(WIDTH, BLOCK)
    g = tl.load(gate + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=live, other=0.0).to(tl.float32)
    d = tl.load(dgated + i, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    act = g * s
    kind = gated.dtype.element_ty
    tl.store(gated + i, (act * u).to(kind), mask=live)
    tl.store(dgate + i, (d * u * (s + act * (1 - s))).to(kind), mask=live)
    tl.store(dup + i, (d * act).to(kind), mask=live)


def _block(width: int) -> int:
    """The block size: the largest of these that divides a row, if any does."""
    for size in (2048, 1024, 512):
        if width % size == 0:
            return size
    return min(1024, int(triton.next_power_of_2(width)))


def gate(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate_NI, up_NI = gate_NI.contiguous(), up_NI.contiguous()
    gated_NI = torch.empty_like(gate_NI)
    rows, width = gate_NI.shape
    if gate_NI.numel():
        with on_device_of(gate_NI):
            _gate_forward[(rows, triton.cdiv(width, _block(width)))](
                gate_NI, up_NI, gated_NI, WIDTH=width, BLOCK=_block(width)
            )
    return gated_NI


def gate_backward(
    gate_NI: Tensor, up_NI: Tensor, dgated_NI: Tensor, *, use_up: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of gate and up. dgated is overwritten, and
    with `use_up` gate and up as well: they are the widest tensors of a step."""
    gate_NI, up_NI, dgated_NI = (x.contiguous() for x in (gate_NI, up_NI, dgated_NI))
    gated_NI, dgate_NI = (
        (gate_NI, up_NI) if use_up else (torch.empty_like(gate_NI), torch.empty_like(gate_NI))
    )
    rows, width = gate_NI.shape
    if gate_NI.numel():
        with on_device_of(gate_NI):
            _gate_backward[(rows, triton.cdiv(width, _block(width)))](
                gate_NI, up_NI, dgated_NI, gated_NI, dgate_NI, dgated_NI,
                WIDTH=width, BLOCK=_block(width),
            )  # fmt: skip
    return gated_NI, dgate_NI, dgated_NI


# --- heads ---------------------------------------------------------------------------------------
# Queries, keys and values of a layer, split, normed and rotated: a head is read once, and only the
# projection is kept for the backward pass. Shapes: X = (H + 2 G) C, the H query heads first, then G
# keys, then G values.

ROWS = 32  # per program


@triton.jit
def _norm_factor(low, high, HALF: tl.constexpr, EPS: tl.constexpr):
    """1 / the root mean square of each row."""
    total = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    return tl.rsqrt(total / (2 * HALF) + EPS)


@triton.jit(do_not_specialize=["num_rows"])
def _split(
    x, q_norm, k_norm, cos, sin, q, k, v, x_row, num_rows,
    EPS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    live = (row < num_rows)[:, None] & (c < HALF)[None, :]
    source = x + (row * x_row + head * (2 * HALF))[:, None] + c[None, :]
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    out = v + (row * GROUPS + head - HEADS - GROUPS)[:, None] * (2 * HALF) + c[None, :]
    if head < HEADS + GROUPS:
        norm = k_norm
        out = k + (row * GROUPS + head - HEADS)[:, None] * (2 * HALF) + c[None, :]
        if head < HEADS:
            norm = q_norm
            out = q + (row * HEADS + head)[:, None] * (2 * HALF) + c[None, :]
        factor = _norm_factor(low, high, HALF, EPS)[:, None]
        low *= factor * tl.load(norm + c, mask=c < HALF, other=0.0).to(tl.float32)[None, :]
        high *= factor * tl.load(norm + HALF + c, mask=c < HALF, other=0.0).to(tl.float32)[None, :]
        low, high = _rotated(low, high, cos, sin, row, c, live, HALF, False)
    tl.store(out, low.to(v.dtype.element_ty), mask=live)
    tl.store(out + HALF, high.to(v.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _join(
    x, q_norm, k_norm, cos, sin, dq, dk, dv, dx, dnorm, x_row, num_rows,
    EPS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the projection, and what these rows contribute to the norms' gradients."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    live = (row < num_rows)[:, None] & (c < HALF)[None, :]
    source = dv + (row * GROUPS + head - HEADS - GROUPS)[:, None] * (2 * HALF) + c[None, :]
    norm = k_norm
    if head < HEADS + GROUPS:
        source = dk + (row * GROUPS + head - HEADS)[:, None] * (2 * HALF) + c[None, :]
    if head < HEADS:
        norm = q_norm
        source = dq + (row * HEADS + head)[:, None] * (2 * HALF) + c[None, :]
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
    if head < HEADS + GROUPS:
        low, high = _rotated(low, high, cos, sin, row, c, live, HALF, True)
        before = x + (row * x_row + head * (2 * HALF))[:, None] + c[None, :]
        x_low = tl.load(before, mask=live, other=0.0).to(tl.float32)
        x_high = tl.load(before + HALF, mask=live, other=0.0).to(tl.float32)
        factor = _norm_factor(x_low, x_high, HALF, EPS)[:, None]
        x_low *= factor
        x_high *= factor
        share = dnorm + (tl.program_id(0) * (HEADS + GROUPS) + head) * (2 * HALF) + c
        tl.store(share, tl.sum(low * x_low, 0), mask=c < HALF)
        tl.store(share + HALF, tl.sum(high * x_high, 0), mask=c < HALF)
        low *= tl.load(norm + c, mask=c < HALF, other=0.0).to(tl.float32)[None, :]
        high *= tl.load(norm + HALF + c, mask=c < HALF, other=0.0).to(tl.float32)[None, :]
        along = (tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1)) / (2 * HALF)
        low = factor * (low - along[:, None] * x_low)
        high = factor * (high - along[:, None] * x_high)
    target = (
        dx + (row * ((HEADS + 2 * GROUPS) * 2 * HALF) + head * (2 * HALF))[:, None] + c[None, :]
    )
    tl.store(target, low.to(dx.dtype.element_ty), mask=live)
    tl.store(target + HALF, high.to(dx.dtype.element_ty), mask=live)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NX: Tensor, q_norm_C: Tensor, k_norm_C: Tensor, cos_NC: Tensor, sin_NC: Tensor,
        eps: float, groups: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows, channels = cos_NC.shape
        heads = x_NX.shape[1] // channels - 2 * groups
        counts = (heads, groups, groups)
        q, k, v = (x_NX.new_empty(rows, count, channels) for count in counts)
        options = _options(eps, heads, groups, channels)
        if rows:
            with on_device_of(x_NX):
                _split[(triton.cdiv(rows, ROWS), sum(counts))](
                    x_NX, q_norm_C, k_norm_C, cos_NC, sin_NC, q, k, v, x_NX.stride(0), rows,
                    **options,
                )  # fmt: skip
        ctx.save_for_backward(x_NX, q_norm_C, k_norm_C, cos_NC, sin_NC)
        ctx.options = options
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NX, q_norm_C, k_norm_C, cos_NC, sin_NC = ctx.saved_tensors
        rows, channels = cos_NC.shape
        heads, groups = ctx.options["HEADS"], ctx.options["GROUPS"]
        dq, dk, dv = (grad.contiguous() for grad in grads)
        dx_NX, pieces = torch.empty_like(x_NX), triton.cdiv(rows, ROWS)
        dnorm = x_NX.new_zeros(pieces, heads + groups, channels, dtype=torch.float32)
        if rows:
            with on_device_of(x_NX):
                _join[(pieces, heads + 2 * groups)](
                    x_NX, q_norm_C, k_norm_C, cos_NC, sin_NC, dq, dk, dv, dx_NX, dnorm,
                    x_NX.stride(0), rows, **ctx.options,
                )  # fmt: skip
        dnorm = dnorm.sum(0)
        dq_norm = dnorm[:heads].sum(0).to(q_norm_C.dtype)
        dk_norm = dnorm[heads:].sum(0).to(k_norm_C.dtype)
        return dx_NX, dq_norm, dk_norm, None, None, None, None


def _options(eps: float, heads: int, groups: int, channels: int) -> dict[str, Any]:
    return {
        "EPS": eps, "HEADS": heads, "GROUPS": groups, "HALF": channels // 2,
        "BLOCK_C": triton.next_power_of_2(channels // 2), "BLOCK": ROWS,
    }  # fmt: skip


def fused_heads(
    x_NX: Tensor, q_norm_C: Tensor, k_norm_C: Tensor, cos_NC: Tensor, sin_NC: Tensor,
    eps: float, groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`rotary.split_heads` on a GPU; cos and sin get no gradient."""
    out: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(
        x_NX.contiguous(), q_norm_C, k_norm_C, cos_NC.contiguous(), sin_NC.contiguous(), eps, groups
    )
    return out
