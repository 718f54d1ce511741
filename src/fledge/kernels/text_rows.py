# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Row losses against the text's token and the target's distribution, with their gradients, on a GPU
in one kernel.

Same results as `objective.frozen_head.text_rows`. One program owns a row: it reads the logits as
they are for the sums, and once more, from the cache, to replace them by their gradient. Without a
distance no distribution is read. Importing this file imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of

BLOCK = 4096  # columns at a time


@triton.jit
def _load(row, w, width, other):
    return tl.load(row + w, mask=w < width, other=other).to(tl.float32)


@triton.jit(do_not_specialize=["probs", "slot", "label", "coefficient", "text", "far"])
def score_text_rows(
    logits, probs, slot, label, coefficient, loss, correct, distance, width, text, far,
    DISTANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`text` and `far` are what the two terms count."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    said = tl.load(label + row)
    wanted = tl.load(logits + said).to(tl.float32)
    peak = float("-inf")
    at = 0
    total = 0.0
    for start in range(0, width, BLOCK):
        w = start + tl.arange(0, BLOCK)
        x = _load(logits, w, width, float("-inf"))
        highest, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        at = tl.where(highest > peak, start + index, at)
        higher = tl.maximum(peak, highest)
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    lse = peak + tl.log(total)
    row_loss = text * (lse - wanted)

    # |q - p|, and the mean over q of its sign, which the softmax takes off every gradient.
    mean = 0.0
    apart = 0.0
    if DISTANCE:
        probs += tl.load(slot + row) * width
        apart_lane = tl.zeros([BLOCK], tl.float32)
        mean_lane = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            w = start + tl.arange(0, BLOCK)
            q = tl.exp(_load(logits, w, width, float("-inf")) - lse)
            p = _load(probs, w, width, 0.0)
            apart_lane += tl.abs(q - p)
            mean_lane += q * ((q > p).to(tl.float32) - (q < p).to(tl.float32))
        apart = tl.sum(apart_lane, 0)
        mean = tl.sum(mean_lane, 0)
        row_loss += far * apart
        tl.store(distance + row, apart)
    tl.store(loss + row, row_loss)
    tl.store(correct + row, at == said)

    factor = tl.load(coefficient + row)
    for start in range(0, width, BLOCK):
        w = start + tl.arange(0, BLOCK)
        q = tl.exp(_load(logits, w, width, float("-inf")) - lse)
        grad = text * (q - (w == said).to(tl.float32))
        if DISTANCE:
            p = _load(probs, w, width, 0.0)
            side = (q > p).to(tl.float32) - (q < p).to(tl.float32)
            grad += far * q * (side - mean)
        tl.store(logits + w, (grad * factor).to(logits.dtype.element_ty), mask=w < width)


def fused_text_rows(
    logits_JW: Tensor,
    probs_MW: Tensor | None,
    slot_J: Tensor | None,  # which row of `probs_MW` is an element's target
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
    apart = probs_MW is not None
    with on_device_of(logits_JW):
        score_text_rows[(count,)](
            logits_JW,
            probs_MW.contiguous() if probs_MW is not None else logits_JW,
            slot_J if slot_J is not None else label_J,
            label_J, coefficient_J.float(), loss_J, correct_J, distance_J, width,
            text_weight, distance_weight, DISTANCE=apart,
            BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return loss_J, correct_J, distance_J
