"""LK-lambda (arXiv 2602.23881): moves from cross entropy to acceptance as acceptance grows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.base import Loss, acceptance, acceptance_rows, parameter
from fledge.methods.losses.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_rows,
    soft_cross_entropy,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LkLambda(Loss):
    """LK-lambda: w ce + (1 - w)(1 - acceptance), with w = scale * exp(-decay * mean acceptance)."""

    scale: float = parameter(1.0, "Weight of the cross entropy at acceptance 0.", ge=0, le=1)
    decay: float = parameter(3.0, "How fast that weight falls with acceptance.", ge=0)

    kind = "lk_lambda"
    kernel = "lambda"
    needs_acceptance = True

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        """Expects all rows of the loss, because they share one mean acceptance."""
        alpha_N = acceptance(logits_NW, probs_NW)
        weight = self.weight(alpha_N.sum() / max(len(alpha_N), 1))
        return weight * soft_cross_entropy(logits_NW, probs_NW) + (1 - weight) * (1 - alpha_N)

    def weight(self, mean_acceptance: "Tensor") -> "Tensor":
        """The weight of the cross entropy."""
        return self.scale * (-self.decay * mean_acceptance.detach()).exp()

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        assert weight_J is not None
        ce_J, q_JW, mass_J = cross_entropy_rows(logits_JW, probs_JW)
        alpha_J, dalpha_JW = acceptance_rows(q_JW, probs_JW)
        loss_J = weight_J * ce_J + (1 - weight_J) * (1 - alpha_J)
        dce_JW = cross_entropy_gradient(q_JW, probs_JW, mass_J)
        return loss_J, (-dalpha_JW).lerp(dce_JW, weight_J[:, None])
