"""Total variation: half the L1 distance between the distributions, which is 1 - acceptance."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.base import Loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TotalVariation(Loss):
    """Half the sum of |draft - target|: the probability that speculative sampling rejects."""

    kind = "tv"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        return 0.5 * (logits_NW.softmax(dim=-1) - probs_NW).abs().sum(-1)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        lse_J1 = logits_JW.logsumexp(dim=-1, keepdim=True)
        q_JW = logits_JW.sub_(lse_J1).exp_()
        difference_JW = q_JW - probs_JW
        loss_J = 0.5 * difference_JW.abs().sum(-1)
        sign_JW = difference_JW.sign_()
        mean_J1 = (q_JW * sign_JW).sum(-1, keepdim=True)
        return loss_J, q_JW.mul_(sign_JW.sub_(mean_J1)).mul_(0.5)
