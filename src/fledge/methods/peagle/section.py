"""The recipe section of P-EAGLE."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fledge.core.settings import Count, DraftedTokens, PositiveCount, PositiveShare, Share, Tagged
from fledge.methods.section import LossChoice, LossSection, loss_choices


class PeagleSection(LossSection):
    """P-EAGLE: all depths in one parallel pass."""

    not_options = LossSection.not_options | {"mask_token_id"}

    kind: Literal["peagle"] = "peagle"
    """Drafts all tokens at once; vLLM serves it, SGLang does not."""

    loss: Annotated[LossChoice, Tagged("kind", loss_choices, default="kl", bare=True)] = Field(
        default_factory=lambda: loss_choices()["kl"].model_validate({})
    )
    """The loss on the draft's distribution: a name, or a mapping of kind and parameters."""

    num_depths: DraftedTokens = 8
    """Depths trained: as many as tokens drafted in serving."""

    down_sample_ratio: PositiveShare = 0.7
    """Share of rollouts kept from each depth to the next."""

    down_sample_ratio_min: Share = 0.2
    """Floor of the share kept at a depth."""

    sequence_partitions: PositiveCount = 1
    """Cut the elements into this many parts, one after another: same gradient, less memory."""

    mask_token_id: Count | None = None
    """Token id of the placeholder; null: one that the tokenizer never emits is chosen."""

    balance_depths: bool = False
    """Give every depth the same weight instead of every element."""

    @model_validator(mode="after")
    def _floor_below_ratio(self) -> "PeagleSection":
        if self.down_sample_ratio_min > self.down_sample_ratio:
            raise ValueError("down_sample_ratio_min is above down_sample_ratio")
        return self

    @property
    def placeholder(self) -> int | None:
        return self.mask_token_id

    @property
    def depths(self) -> int:
        return self.num_depths
