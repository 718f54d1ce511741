"""LK-alpha (arXiv 2602.23881): the logarithm of acceptance."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.objective.losses.acceptance import acceptance, acceptance_rows
from fledge.objective.losses.base import Loss
from fledge.objective.losses.cross_entropy import cross_entropy_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LkAlpha(Loss):
    """LK-alpha: -log acceptance; 0 where acceptance is 0, which has no direction to offer."""

    kind = "lk_alpha"
    kernel = "alpha"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        alpha_N = acceptance(logits_NW, probs_NW)
        return -alpha_N.where(alpha_N > 0, 1.0).log()

    def rows(
        self, logits_CW: "Tensor", probs_CW: "Tensor", weight_C: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        _, q_CW, _ = cross_entropy_rows(logits_CW, probs_CW)
        alpha_C, dalpha_CW = acceptance_rows(q_CW, probs_CW)
        safe_C = alpha_C.where(alpha_C > 0, 1.0)
        return -safe_C.log(), dalpha_CW * (-1 / safe_C).where(alpha_C > 0, 0.0)[:, None]
