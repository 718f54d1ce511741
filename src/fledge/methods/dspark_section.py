"""DSpark's section of a recipe."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fledge.core.settings import NonNegative, Positive, PositiveCount, ShareBelowOne
from fledge.methods.block_section import BlockSection


class DsparkSection(BlockSection):
    """DSpark: DFlash's block, drafted left to right through a small Markov head, with a confidence
    that says how far it is worth verifying."""

    kind: Literal["dspark"] = "dspark"
    """Drafts a block in one pass, each token given the one before; vLLM and SGLang serve it."""

    not_options: ClassVar[frozenset[str]] = BlockSection.not_options | {
        "markov_rank", "confidence_threshold",
    }  # fmt: skip

    contiguous: ClassVar[bool] = True

    block_size: Annotated[PositiveCount, Field(ge=1, le=1024)] = 7
    """Slots of a block, which are the tokens that it drafts."""

    gamma: Positive | None = 4.0
    """A token k places into the block has weight exp(-k / gamma)."""

    markov_rank: PositiveCount = 256
    """Width of the Markov head."""

    text_weight: NonNegative = 0.1
    """Weight of the cross entropy with the text's token."""

    distance_weight: NonNegative = 0.9
    """Weight of the distance between the distributions, |draft - target|."""

    confidence_weight: NonNegative = 1.0
    """Weight of the error of the confidence; 0: no confidence head."""

    confidence_threshold: ShareBelowOne = 0.0
    """Decoding stops before the first token for which the probability that it and all tokens before
    it are accepted is below this; 0: never."""

    @property
    def depths(self) -> int:
        return self.block_size

    @property
    def reads_target(self) -> bool:
        return self.distance_weight > 0

    def draft_settings(self) -> dict[str, object]:
        return {
            **super().draft_settings(),
            "sample_from_anchor": True,
            "markov_rank": self.markov_rank,
            "confidence_head": self.confidence_weight > 0,
            "confidence_threshold": self.confidence_threshold,
        }
