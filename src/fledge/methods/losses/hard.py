"""Cross entropy with one token: the target's likeliest, or the text's own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.methods.losses.cross_entropy import CrossEntropy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HardCrossEntropy(CrossEntropy):
    """Cross entropy with the target's top token."""

    kind = "hard"
    kernel = "hard"

    def definition(self, logits_NW: "Tensor", probs_NW: "Tensor") -> "Tensor":
        top_N1 = probs_NW.argmax(-1, keepdim=True)
        return -logits_NW.log_softmax(dim=-1).gather(-1, top_N1).squeeze(-1)

    def rows(
        self, logits_JW: "Tensor", probs_JW: "Tensor", weight_J: "Tensor | None" = None
    ) -> "tuple[Tensor, Tensor]":
        top_J1 = probs_JW.argmax(-1, keepdim=True)
        one_hot_JW = probs_JW.new_zeros(probs_JW.shape).scatter_(-1, top_J1, 1.0)
        return super().rows(logits_JW, one_hot_JW)


@dataclass(frozen=True)
class TextCrossEntropy(HardCrossEntropy):
    """Cross entropy with the token that follows in the text, for objectives that have the text. If
    the target wrote it, the token is a sample of its distribution. The "probabilities" are one-hot.
    """

    kind = "text"
