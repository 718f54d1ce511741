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
        self, logits_CW: "Tensor", probs_CW: "Tensor", weight_C: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        loss_C, q_CW, mass_C = cross_entropy_rows(logits_CW, probs_CW)
        loss_C = loss_C + probs_CW.xlogy(probs_CW).sum(-1)
        return loss_C, cross_entropy_gradient(q_CW, probs_CW, mass_C)
