"""LK-alpha (arXiv 2602.23881): the logarithm of acceptance."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.base import Loss, acceptance, acceptance_rows
from fledge.methods.losses.cross_entropy import cross_entropy_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LkAlpha(Loss):
    """LK-alpha: -log acceptance; 0 where acceptance is 0, which has no gradient."""

    kind = "lk_alpha"
    kernel = "alpha"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        alpha_N = acceptance(logits_NW, probs_NW)
        return -alpha_N.where(alpha_N > 0, 1.0).log()

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        _, q_JW, _ = cross_entropy_rows(logits_JW, probs_JW)
        alpha_J, dalpha_JW = acceptance_rows(q_JW, probs_JW)
        safe_J = alpha_J.where(alpha_J > 0, 1.0)
        return -safe_J.log(), dalpha_JW * (-1 / safe_J).where(alpha_J > 0, 0.0)[:, None]
