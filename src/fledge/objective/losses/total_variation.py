"""Total variation: half of the distance between the distributions, 1 - acceptance."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.objective.losses.base import Loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TotalVariation(Loss):
    """Half the sum of |draft - target|: the chance that speculative sampling rejects."""

    kind = "tv"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        return 0.5 * (logits_NW.softmax(dim=-1) - probs_NW).abs().sum(-1)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        lse_J1 = logits_JW.logsumexp(dim=-1, keepdim=True)
        q_JW = logits_JW.sub_(lse_J1).exp_()
        apart_JW = q_JW - probs_JW
        loss_J = 0.5 * apart_JW.abs().sum(-1)
        side_JW = apart_JW.sign_()
        mean_J1 = (q_JW * side_JW).sum(-1, keepdim=True)
        return loss_J, q_JW.mul_(side_JW.sub_(mean_J1)).mul_(0.5)
