"""Soft cross entropy, and the parts of it that other losses share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.objective.losses.base import Loss

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
        self, logits_CW: "Tensor", probs_CW: "Tensor", weight_C: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        loss_C, q_CW, mass_C = cross_entropy_rows(logits_CW, probs_CW)
        return loss_C, cross_entropy_gradient(q_CW, probs_CW, mass_C)


def soft_cross_entropy(logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
    return -(probs_NW * logits_NW.log_softmax(dim=-1)).sum(-1)


def cross_entropy_rows(logits_CW: "Tensor", probs_CW: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
    """Losses [C], the draft's probabilities [C, W] in place of its logits, the target's mass."""
    lse_C1 = logits_CW.logsumexp(dim=-1, keepdim=True)
    mass_C = probs_CW.sum(-1)  # 1 up to how the probabilities were stored
    loss_C = lse_C1.squeeze(-1) * mass_C - (probs_CW * logits_CW).sum(-1)
    return loss_C, logits_CW.sub_(lse_C1).exp_(), mass_C


def cross_entropy_gradient(q_CW: "Tensor", probs_CW: "Tensor", mass_C: "Tensor") -> "Tensor":
    """The gradient with respect to the logits, in place of the draft's probabilities."""
    return q_CW.mul_(mass_C[:, None]).sub_(probs_CW)
