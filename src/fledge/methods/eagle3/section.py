"""The recipe section of EAGLE-3."""

from typing import Literal

from fledge.core.settings import DraftedTokens, PositiveShare
from fledge.methods.section import LossSection


class Eagle3Section(LossSection):
    """EAGLE-3: training-time test, each step from the draft's own output."""

    kind: Literal["eagle3"] = "eagle3"
    """Drafts tokens one after another; every engine serves it."""

    ttt_steps: DraftedTokens = 7
    """Steps unrolled in training: as many as tokens drafted in serving."""

    step_decay: PositiveShare = 0.8
    """Weight of step k is step_decay ** k."""

    depth_keep: PositiveShare = 1.0
    """Probability that a rollout continues to the next step; 0.7 halves the draft's work."""

    @property
    def depths(self) -> int:
        return self.ttt_steps
