"""KL(draft || target): seeks the target's modes, where `kl` covers all of its mass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.base import SMALLEST, Loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReverseKL(Loss):
    """KL(draft || target): the draft may leave out what the target can say, but not add to it."""

    kind = "reverse_kl"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        log_q_NW = logits_NW.log_softmax(dim=-1)
        return (log_q_NW.exp() * (log_q_NW - _log(probs_NW))).sum(-1)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        log_q_JW = logits_JW.sub_(logits_JW.logsumexp(dim=-1, keepdim=True))
        q_JW = log_q_JW.exp()
        ratio_JW = log_q_JW.sub_(_log(probs_JW))
        loss_J = (q_JW * ratio_JW).sum(-1)
        return loss_J, ratio_JW.sub_(loss_J[:, None]).mul_(q_JW)


def _log(probs_JW: "Tensor") -> "Tensor":
    """Logarithms that stay finite where a probability has become 0 by rounding."""
    return probs_JW.clamp_min(SMALLEST).log()
