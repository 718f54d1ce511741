"""The recipe sections of EAGLE-1 and EAGLE-2."""

from typing import Literal

from fledge.core.settings import DraftedTokens, NonNegative
from fledge.methods.section import LossSection


class _Eagle1Shared(LossSection):
    """The settings of both, which are trained in the same way."""

    draft_tokens: DraftedTokens = 5
    """Tokens drafted in serving and on held-out rows; training looks one token ahead."""

    feature_weight: NonNegative = 1.0
    """Weight of the error of the state (smooth L1)."""

    token_weight: NonNegative = 0.1
    """Weight of `loss`, computed with the target's own head."""

    feature_noise: NonNegative = 0.1
    """Training adds uniform noise between -this and this to the target's states, because in serving
    the draft reads its own states, which are inexact."""

    @property
    def depths(self) -> int:
        return self.draft_tokens


class Eagle1Section(_Eagle1Shared):
    """EAGLE-1: predicts the target's next hidden state, one step at a time."""

    kind: Literal["eagle1"] = "eagle1"
    """Drafts tokens one after another, with the target's own head."""


class Eagle2Section(_Eagle1Shared):
    """EAGLE-2: EAGLE-1's training, drafting trees of the likeliest continuations."""

    kind: Literal["eagle2"] = "eagle2"
    """Trained like EAGLE-1; drafts a tree of the likeliest continuations."""
