"""What the recipe sections of block drafters share."""

from abc import abstractmethod
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from fledge.core.settings import Count, Positive, PositiveCount
from fledge.methods.section import ObjectiveSection

_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # what published drafts were trained with


class BlockSection(ObjectiveSection):
    """All tokens of a block in one pass of a few layers that attend to the target's features."""

    not_options: ClassVar[frozenset[str]] = ObjectiveSection.not_options | {
        *("listened_layers", "block_size", "causal", "sliding_window", "sliding_layers"),
        "mask_token_id",
    }

    contiguous: ClassVar[bool] = False
    """Whether a block is charged only up to its first token that is not supervised."""

    listened_layers: PositiveCount = 5
    """How many of the target's layers the draft reads; `target.aux_layer_ids` names them."""

    block_size: Annotated[PositiveCount, Field(ge=2, le=1024)] = 16
    """Slots of a block."""

    anchors: PositiveCount = 512
    """Blocks per 2,048 tokens of a document, drawn anew in every step; fewer if fewer tokens are
    supervised."""

    gamma: Positive | None = None
    """A token k places into the block has weight exp(-k / gamma); null: 7, 5, 4 for blocks of 16,
    10, 8, and in proportion for others."""

    causal: bool = False
    """Slots of a block see only those before them, instead of all."""

    sliding_layers: tuple[Count, ...] = ()
    """Draft layers, from 0, that attend only to the last `sliding_window` tokens."""

    sliding_window: PositiveCount = 2048
    """Tokens that these layers attend to; inside the block they are causal."""

    mask_token_id: Count | None = None
    """Token id of the placeholder; null: one that the tokenizer never emits is chosen."""

    @property
    def decay_tokens(self) -> float:
        """`gamma`, or its default for this block size."""
        if self.gamma is not None:
            return self.gamma
        near = min(_GAMMAS, key=lambda size: abs(size - self.block_size))
        return _GAMMAS[near] * self.block_size / near

    @property
    @abstractmethod
    def reads_target(self) -> bool:
        """Whether the loss reads the target's distribution, or the text alone."""

    def options(self) -> dict[str, object]:
        return {**super().options(), "gamma": self.decay_tokens}

    def draft_settings(self) -> dict[str, object]:
        """The entries of the draft's config that this section sets."""
        return {
            "block_size": self.block_size,
            "causal": self.causal,
            "sliding_layers": list(self.sliding_layers),
            "sliding_window": self.sliding_window if self.sliding_layers else None,
            "num_aux_hidden_states": self.listened_layers,
        }

    @model_validator(mode="after")
    def _check_sliding_layers(self) -> "BlockSection":
        if len(set(self.sliding_layers)) < len(self.sliding_layers):
            raise ValueError("sliding_layers: each layer once")
        return self
