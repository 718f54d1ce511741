# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Row losses against the text's token and the target's distribution, and their gradients, in one
GPU kernel.

Same results as `objective.frozen_head.text_rows`. One program handles a row: it reads the logits in
their own dtype for the sums, and again, from the cache, to overwrite them with their gradient.
Without a distance term, the distribution is not read. Importing this file imports Triton.
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


@triton.jit(do_not_specialize=["probs", "slot", "label", "coefficient", "text", "far"])
def score_text_rows(
    logits, probs, slot, label, coefficient, loss, correct, distance, width, text, far,
    DISTANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`text` and `far` are the weights of the cross entropy and of the distance."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    token = tl.load(label + row)
    token_logit = tl.load(logits + token).to(tl.float32)
    peak = float("-inf")
    argmax = 0
    total = 0.0
    for start in range(0, width, BLOCK):
        w = start + tl.arange(0, BLOCK)
        x = _load(logits, w, width, float("-inf"))
        highest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        argmax = tl.where(highest > peak, start + index, argmax)
        higher = tl.maximum(peak, highest)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    lse = peak + tl.log(total)
    row_loss = text * (lse - token_logit)

    # |q - p|, and the mean of its sign under q, which the softmax subtracts from every gradient.
    mean = 0.0
    row_distance = 0.0
    if DISTANCE:
        probs += tl.load(slot + row) * width
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
    tl.store(correct + row, argmax == token)

    factor = tl.load(coefficient + row)
    for start in range(0, width, BLOCK):
        w = start + tl.arange(0, BLOCK)
        q = tl.exp(_load(logits, w, width, float("-inf")) - lse)
        grad = text * (q - (w == token).to(tl.float32))
        if DISTANCE:
            p = _load(probs, w, width, 0.0)
            sign = (q > p).to(tl.float32) - (q < p).to(tl.float32)
            grad += far * q * (sign - mean)
        tl.store(logits + w, (grad * factor).to(logits.dtype.element_ty), mask=w < width)


def fused_text_rows(
    logits_JW: Tensor,
    probs_MW: Tensor | None,
    slot_J: Tensor | None,  # the row of `probs_MW` that is an element's target
    label_J: Tensor,
    coefficient_J: Tensor,
    *,
    text_weight: float,
    distance_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row losses [J], hits [J] and distances [J]; the logits become coefficient * gradient."""
    assert logits_JW.is_contiguous()
    count, width = logits_JW.shape
    loss_J = logits_JW.new_empty(count, dtype=torch.float32)
    correct_J = logits_JW.new_empty(count, dtype=torch.bool)
    distance_J = torch.zeros_like(loss_J)
    with_distance = probs_MW is not None
    with on_device_of(logits_JW):
        score_text_rows[(count,)](
            logits_JW,
            probs_MW.contiguous() if probs_MW is not None else logits_JW,
            slot_J if slot_J is not None else label_J,
            label_J, coefficient_J.float(), loss_J, correct_J, distance_J, width,
            text_weight, distance_weight, DISTANCE=with_distance,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return loss_J, correct_J, distance_J
