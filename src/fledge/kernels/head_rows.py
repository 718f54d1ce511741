# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Row losses of a chunk of draft logits and their gradients, in one GPU kernel.

`fused_rows` has the results of the losses (`Loss.rows`) and those of `head_loss.text_rows`. The
torch code reads and writes [J, W] in fp32 some twenty times. Here one program handles a row: it
reads the logits in their own dtype for the sums, and reads them again, from the cache, to overwrite
them with their gradient. The target's probabilities have one row per slot, however many elements
share the slot. Importing this file imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of

BLOCK = 4096  # columns per iteration


@triton.jit
def _load(row, w, width, other):
    return tl.load(row + w, mask=w < width, other=other).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        *("probs", "slot", "top", "coefficient", "ce_weight", "loss", "correct", "distance"),
        *("text", "far"),
    ]
)
def score_rows(
    logits, probs, slot, top, coefficient, ce_weight, loss, correct, distance, width, text, far,
    KIND: tl.constexpr, WRITE: tl.constexpr, DISTANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KIND is the `kernel` of a `Loss`, or "acceptance" to store alpha instead of the loss. `text`
    and `far` are the weights of the cross entropy and, with DISTANCE, of |q - p|."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    if DISTANCE or KIND != "hard":
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
        x = _load(logits, w, width, float("-inf"))
        highest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        argmax = tl.where(highest > peak, start + index, argmax)
        higher = tl.maximum(peak, highest)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
        if KIND == "hard":
            p = (w == best).to(tl.float32)
        else:
            p = _load(probs, w, width, 0.0)
        mass_lane += p
        cross_lane += p * tl.where(w < width, x, 0.0)
        if KIND == "kl":
            neg_entropy_lane += tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
    lse = peak + tl.log(total)
    mass = tl.sum(mass_lane, 0)
    row_loss = text * (lse * mass - tl.sum(cross_lane, 0))
    if KIND == "kl":
        row_loss += tl.sum(neg_entropy_lane, 0)

    # For acceptance: alpha = sum min(p, q), and what the softmax subtracts from its gradient.
    inner = 0.0
    ce_share = text
    accept_scale = 0.0
    if (KIND == "alpha") or (KIND == "lambda") or (KIND == "acceptance"):
        alpha_lane = tl.zeros([BLOCK], tl.float32)
        inner_lane = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            q = tl.exp(_load(logits, w, width, float("-inf")) - lse)
            p = _load(probs, w, width, 0.0)
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

    # |q - p|, and the mean of its sign under q, which the softmax subtracts from every gradient.
    mean = 0.0
    if DISTANCE:
        distance_lane = tl.zeros([BLOCK], tl.float32)
        mean_lane = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            q = tl.exp(_load(logits, w, width, float("-inf")) - lse)
            p = _load(probs, w, width, 0.0)
            distance_lane += tl.abs(q - p)
            mean_lane += q * ((q > p).to(tl.float32) - (q < p).to(tl.float32))
        row_distance = tl.sum(distance_lane, 0)
        mean = tl.sum(mean_lane, 0)
        row_loss += far * row_distance
        tl.store(distance + row, row_distance)

    tl.store(loss + row, row_loss)
    tl.store(correct + row, argmax == best)
    if WRITE:
        factor = tl.load(coefficient + row)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            q = tl.exp(_load(logits, w, width, float("-inf")) - lse)
            if KIND == "hard":
                p = (w == best).to(tl.float32)
            else:
                p = _load(probs, w, width, 0.0)
            grad = ce_share * (q * mass - p)
            if (KIND == "alpha") or (KIND == "lambda"):
                below = 0.5 * ((q < p).to(tl.float32) + (q <= p).to(tl.float32))
                grad += accept_scale * (q * (below - inner))
            if DISTANCE:
                p = _load(probs, w, width, 0.0)
                sign = (q > p).to(tl.float32) - (q < p).to(tl.float32)
                grad += far * q * (sign - mean)
            grad = (grad * factor).to(logits.dtype.element_ty)
            tl.store(logits + w, grad, mask=w < width)


def fused_rows(
    logits_JW: Tensor,
    probs_MW: Tensor | None,
    slot_J: Tensor | None,  # the row of `probs_MW` that is an element's target
    top_J: Tensor,  # the target's top token, or the text's
    *,
    kind: str,
    coefficient_J: Tensor | None = None,
    ce_weight_J: Tensor | None = None,
    text_weight: float = 1.0,
    distance_weight: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row losses [J] in fp32, whether the draft's top token is `top_J`, and, if weighted, the
    distance |q - p|.

    With coefficients, the logits are overwritten by coefficient * gradient of the row loss. `hard`
    without a distance needs no probabilities.
    """
    assert logits_JW.is_contiguous()
    count, width = logits_JW.shape
    loss_J = logits_JW.new_empty(count, dtype=torch.float32)
    correct_J = logits_JW.new_empty(count, dtype=torch.bool)
    distance_J = None if distance_weight is None else torch.empty_like(loss_J)
    with on_device_of(logits_JW):
        score_rows[(count,)](
            logits_JW,
            logits_JW if probs_MW is None else probs_MW.contiguous(),
            top_J if slot_J is None else slot_J,
            top_J,
            loss_J if coefficient_J is None else coefficient_J,
            loss_J if ce_weight_J is None else ce_weight_J,
            loss_J, correct_J, loss_J if distance_J is None else distance_J,
            width, text_weight, distance_weight or 0.0,
            KIND=kind, WRITE=coefficient_J is not None, DISTANCE=distance_weight is not None,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return loss_J, correct_J, distance_J
