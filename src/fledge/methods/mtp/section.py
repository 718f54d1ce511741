"""The recipe section of native multi-token heads."""

from typing import Literal

from fledge.core.settings import DraftedTokens
from fledge.methods.eagle3.section import Eagle3Section


class MtpSection(Eagle3Section):
    """MTP: a native multi-token head, unrolled over several steps."""

    kind: Literal["mtp"] = "mtp"  # type: ignore[assignment]
    """Drafts tokens one after another with a layer of the target's own kind."""

    ttt_steps: DraftedTokens = 3
    """Steps unrolled in training: as many as tokens drafted in serving."""
