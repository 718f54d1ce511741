"""Soft cross entropy, and the parts of it that other losses share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.base import Loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Soft cross entropy with the target's distribution."""

    kind = "ce"
    kernel = "ce"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        return soft_cross_entropy(logits_NW, probs_NW)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        loss_J, q_JW, mass_J = cross_entropy_rows(logits_JW, probs_JW)
        return loss_J, cross_entropy_gradient(q_JW, probs_JW, mass_J)


def soft_cross_entropy(logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
    return -(probs_NW * logits_NW.log_softmax(dim=-1)).sum(-1)


def cross_entropy_rows(logits_JW: "Tensor", probs_JW: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
    """Losses [J], the draft's probabilities [J, W] (overwriting its logits), the target's mass."""
    lse_J1 = logits_JW.logsumexp(dim=-1, keepdim=True)
    mass_J = probs_JW.sum(-1)  # 1, up to the precision in which the probabilities were stored
    loss_J = lse_J1.squeeze(-1) * mass_J - (probs_JW * logits_JW).sum(-1)
    return loss_J, logits_JW.sub_(lse_J1).exp_(), mass_J


def cross_entropy_gradient(q_JW: "Tensor", probs_JW: "Tensor", mass_J: "Tensor") -> "Tensor":
    """The gradient with respect to the logits; overwrites the draft's probabilities."""
    return q_JW.mul_(mass_J[:, None]).sub_(probs_JW)
