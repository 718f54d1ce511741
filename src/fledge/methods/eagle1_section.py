"""The sections of EAGLE-1 and EAGLE-2 in a recipe."""

from typing import Literal

from fledge.core.settings import NonNegative, PositiveCount
from fledge.methods.section import LossSection


class _Shared(LossSection):
    """The settings of both, which are trained in the same way."""

    draft_tokens: PositiveCount = 5
    """Tokens drafted in serving, and followed on held-out rows; training looks one ahead."""

    feature_weight: NonNegative = 1.0
    """What a wrong state costs (smooth L1)."""

    token_weight: NonNegative = 0.1
    """What a wrong distribution costs (`loss`, read by the target's own head)."""

    feature_noise: NonNegative = 0.1
    """Training adds noise from -this to this to the target's states, for in serving the draft
    reads its own, which err."""

    @property
    def depths(self) -> int:
        return self.draft_tokens


class Eagle1Section(_Shared):
    """EAGLE-1: predicts the target's next hidden state, one step at a time."""

    kind: Literal["eagle1"] = "eagle1"
    """Drafts tokens one after another, which the target's own head reads."""


class Eagle2Section(_Shared):
    """EAGLE-2: EAGLE-1's training, drafting trees of the likeliest continuations."""

    kind: Literal["eagle2"] = "eagle2"
    """Trained as EAGLE-1, drafts a tree of the likeliest continuations."""
