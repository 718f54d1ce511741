# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Queries, keys and values of a layer from its projection: one GPU kernel forward, one backward.

Same results as the torch code of `heads.split_heads`, which copies, norms, rounds and rotates each
part separately; here a head is read once, and stays fp32 until it is stored. Only the projection is
kept for the backward pass. Importing this file imports Triton.

Shapes: X = (H + 2 G) C, the H query heads first, then G keys, then G values.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of

ROWS = 32  # per program


@triton.jit
def _norm_factor(low, high, HALF: tl.constexpr, EPS: tl.constexpr):
    """1 / the root mean square of each row."""
    total = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    return tl.rsqrt(total / (2 * HALF) + EPS)


@triton.jit
def _load_turn(cos, sin, row, c, live, HALF: tl.constexpr):
    """cos and sin of a row's lower and upper channels."""
    angle = (row * (2 * HALF))[:, None] + c[None, :]
    cos_low = tl.load(cos + angle, mask=live, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=live, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=live, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=live, other=0.0).to(tl.float32)
    return cos_low, cos_high, sin_low, sin_high


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
        cos_low, cos_high, sin_low, sin_high = _load_turn(cos, sin, row, c, live, HALF)
        rotated_low = low * cos_low - high * sin_low
        high = high * cos_high + low * sin_high
        low = rotated_low
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
        cos_low, cos_high, sin_low, sin_high = _load_turn(cos, sin, row, c, live, HALF)
        rotated_low = low * cos_low + high * sin_high
        high = high * cos_high - low * sin_low
        low = rotated_low
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
    """`heads.split_heads` on a GPU; cos and sin get no gradient."""
    out: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(
        x_NX.contiguous(), q_norm_C, k_norm_C, cos_NC.contiguous(), sin_NC.contiguous(), eps, groups
    )
    return out


# --- head rows -----------------------------------------------------------------------------------
# Row losses of a chunk of draft logits and their gradients, in one GPU kernel.
#
# Same results as the torch code of the losses (`Loss.rows`), which reads and writes [J, W] in fp32
# some twenty times. Here one program handles a row: it reads the logits in their own dtype for the
# sums, and reads them again, from the cache, to overwrite them with their gradient. The target's
# probabilities have one row per slot, however many elements share the slot.
#
# Importing this file imports Triton.


BLOCK = 4096  # columns per iteration


@triton.jit
def _load(row, w, width, other, BLOCK: tl.constexpr):
    return tl.load(row + w, mask=w < width, other=other).to(tl.float32)


@triton.jit(do_not_specialize=["slot", "top", "coefficient", "ce_weight", "loss", "correct"])
def score_rows(
    logits, probs, slot, top, coefficient, ce_weight, loss, correct, width,
    KIND: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KIND is the `kernel` of a `Loss`, or "acceptance" to store alpha instead of the loss."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    probs += tl.load(slot + row) * width
    best = tl.load(top + row)

    peak = float("-inf")
    argmax = 0
    total = 0.0
    mass_lane = tl.zeros([BLOCK], tl.float32)
    cross_lane = tl.zeros([BLOCK], tl.float32)
    neg_entropy_lane = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        w = start + tl.arange(0, BLOCK)
        x = _load(logits, w, width, float("-inf"), BLOCK)
        highest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        argmax = tl.where(highest > peak, start + index, argmax)
        higher = tl.maximum(peak, highest)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
        if KIND == "hard":
            p = (w == best).to(tl.float32)
        else:
            p = _load(probs, w, width, 0.0, BLOCK)
        mass_lane += p
        cross_lane += p * tl.where(w < width, x, 0.0)
        if KIND == "kl":
            neg_entropy_lane += tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
    lse = peak + tl.log(total)
    mass = tl.sum(mass_lane, 0)
    row_loss = lse * mass - tl.sum(cross_lane, 0)
    if KIND == "kl":
        row_loss += tl.sum(neg_entropy_lane, 0)

    # For acceptance: alpha = sum min(p, q), and what the softmax subtracts from its gradient.
    inner = 0.0
    ce_share = 1.0
    accept_scale = 0.0
    if (KIND == "alpha") or (KIND == "lambda") or (KIND == "acceptance"):
        alpha_lane = tl.zeros([BLOCK], tl.float32)
        inner_lane = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            q = tl.exp(_load(logits, w, width, float("-inf"), BLOCK) - lse)
            p = _load(probs, w, width, 0.0, BLOCK)
            alpha_lane += tl.minimum(p, q)
            inner_lane += q * 0.5 * ((q < p).to(tl.float32) + (q <= p).to(tl.float32))
        alpha = tl.sum(alpha_lane, 0)
        inner = tl.sum(inner_lane, 0)
        if KIND == "acceptance":
            row_loss = alpha
        elif KIND == "alpha":
            safe = tl.where(alpha > 0, alpha, 1.0)
            row_loss = -tl.log(safe)
            ce_share = 0.0
            accept_scale = tl.where(alpha > 0, -1.0 / safe, 0.0)
        else:
            ce_share = tl.load(ce_weight + row)
            row_loss = ce_share * row_loss + (1 - ce_share) * (1 - alpha)
            accept_scale = ce_share - 1

    tl.store(loss + row, row_loss)
    tl.store(correct + row, argmax == best)
    if WRITE:
        factor = tl.load(coefficient + row)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            q = tl.exp(_load(logits, w, width, float("-inf"), BLOCK) - lse)
            if KIND == "hard":
                p = (w == best).to(tl.float32)
            else:
                p = _load(probs, w, width, 0.0, BLOCK)
            grad = ce_share * (q * mass - p)
            if (KIND == "alpha") or (KIND == "lambda"):
                below = 0.5 * ((q < p).to(tl.float32) + (q <= p).to(tl.float32))
                grad += accept_scale * (q * (below - inner))
            grad = (grad * factor).to(logits.dtype.element_ty)
            tl.store(logits + w, grad, mask=w < width)


def fused_rows(
    logits_JW: Tensor,
    probs_MW: Tensor,
    slot_J: Tensor,  # the row of `probs_MW` that is an element's target
    top_J: Tensor,  # the target's top token
    *,
    kind: str,
    coefficient_J: Tensor | None = None,
    ce_weight_J: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Row losses [J] in fp32, and whether the draft's top token is the target's.

    With coefficients, the logits are overwritten by coefficient * gradient of the row loss.
    """
    assert logits_JW.is_contiguous()
    count, width = logits_JW.shape
    loss_J = logits_JW.new_empty(count, dtype=torch.float32)
    correct_J = logits_JW.new_empty(count, dtype=torch.bool)
    with on_device_of(logits_JW):
        score_rows[(count,)](
            logits_JW, probs_MW.contiguous(), slot_J, top_J,
            loss_J if coefficient_J is None else coefficient_J,
            loss_J if ce_weight_J is None else ce_weight_J,
            loss_J, correct_J, width,
            KIND=kind, WRITE=coefficient_J is not None,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return loss_J, correct_J
