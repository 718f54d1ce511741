"""Acceptance: not a loss itself, but the quantity that the LK losses maximize."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def acceptance(logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
    """alpha = sum min(p, q): the probability that speculative sampling accepts a drafted token."""
    return probs_NW.minimum(logits_NW.softmax(dim=-1)).sum(-1)


def acceptance_rows(q_JW: "Tensor", probs_JW: "Tensor") -> "tuple[Tensor, Tensor]":
    """alpha [J] and its gradient with respect to the logits (half where p = q)."""
    alpha_J = probs_JW.minimum(q_JW).sum(-1)
    below_JW = 0.5 * ((q_JW < probs_JW).to(q_JW.dtype) + (q_JW <= probs_JW).to(q_JW.dtype))
    inner_J1 = (q_JW * below_JW).sum(-1, keepdim=True)
    return alpha_J, q_JW * (below_JW - inner_J1)
