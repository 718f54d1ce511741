"""KL(target || draft): the cross entropy less the target's own entropy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.objective.losses.base import Loss
from fledge.objective.losses.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_rows,
    soft_cross_entropy,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KLDivergence(Loss):
    """KL(target || draft): the gradient of ce, and 0 for a perfect draft."""

    kind = "kl"
    kernel = "kl"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        return soft_cross_entropy(logits_NW, probs_NW) + probs_NW.xlogy(probs_NW).sum(-1)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        loss_J, q_JW, mass_J = cross_entropy_rows(logits_JW, probs_JW)
        loss_J = loss_J + probs_JW.xlogy(probs_JW).sum(-1)
        return loss_J, cross_entropy_gradient(q_JW, probs_JW, mass_J)
