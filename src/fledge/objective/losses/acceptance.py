"""Acceptance: not a loss, but what the LK losses raise."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def acceptance(logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
    """alpha = sum min(p, q): the chance that speculative sampling accepts the draft's token."""
    return probs_NW.minimum(logits_NW.softmax(dim=-1)).sum(-1)


def acceptance_rows(q_CW: "Tensor", probs_CW: "Tensor") -> "tuple[Tensor, Tensor]":
    """alpha [C] and its gradient with respect to the logits (half where p = q)."""
    alpha_C = probs_CW.minimum(q_CW).sum(-1)
    below_CW = 0.5 * ((q_CW < probs_CW).to(q_CW.dtype) + (q_CW <= probs_CW).to(q_CW.dtype))
    inner_C1 = (q_CW * below_CW).sum(-1, keepdim=True)
    return alpha_C, q_CW * (below_CW - inner_C1)
