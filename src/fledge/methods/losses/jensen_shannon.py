"""The Jensen-Shannon divergence: symmetric, and never more than log 2."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.base import SMALLEST, Loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class JensenShannon(Loss):
    """Mean of KL(target || m) and KL(draft || m), where m is the mean of both distributions."""

    kind = "js"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        q_NW = logits_NW.softmax(dim=-1)
        mean_NW = 0.5 * (q_NW + probs_NW)
        of_target_N = (probs_NW.xlogy(probs_NW) - probs_NW.xlogy(mean_NW)).sum(-1)
        of_draft_N = (q_NW.xlogy(q_NW) - q_NW.xlogy(mean_NW)).sum(-1)
        return 0.5 * (of_target_N + of_draft_N)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        log_q_JW = logits_JW.sub_(logits_JW.logsumexp(dim=-1, keepdim=True))
        q_JW = log_q_JW.exp()
        mean_JW = (q_JW + probs_JW).mul_(0.5)
        of_target_J = (probs_JW.xlogy(probs_JW) - probs_JW.xlogy(mean_JW)).sum(-1)
        # by q the derivative is half of log(q / m): those of m cancel; where q and m have become 0
        # by rounding, the ratio is finite and multiplied by 0
        ratio_JW = log_q_JW.sub_(mean_JW.clamp_min_(SMALLEST).log_()).mul_(0.5)
        half_J1 = (q_JW * ratio_JW).sum(-1, keepdim=True)  # half of KL(draft || m)
        return 0.5 * of_target_J + half_J1[:, 0], ratio_JW.sub_(half_J1).mul_(q_JW)
