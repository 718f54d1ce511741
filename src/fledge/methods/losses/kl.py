"""KL(target || draft): the cross entropy minus the target's own entropy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.cross_entropy import CrossEntropy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KLDivergence(CrossEntropy):
    """KL(target || draft): same gradient as ce, and 0 for a perfect draft."""

    kind = "kl"
    kernel = "kl"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        return super().definition(logits_NW, probs_NW) + probs_NW.xlogy(probs_NW).sum(-1)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        ce_J, dlogits_JW = super().rows(logits_JW, probs_JW)
        return ce_J + probs_JW.xlogy(probs_JW).sum(-1), dlogits_JW
