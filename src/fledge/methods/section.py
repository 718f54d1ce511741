"""The `objective` section of a recipe, which each method has of its own.

This file does not import torch, and training steps do not import this file (nor pydantic).
"""

from abc import abstractmethod
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, field_validator, model_validator

from fledge.core.settings import (
    Count,
    DraftedTokens,
    NonNegative,
    Number,
    Positive,
    PositiveCount,
    PositiveShare,
    Section,
    Share,
    ShareBelowOne,
    Tagged,
)
from fledge.methods.losses.base import Loss
from fledge.methods.losses.registry import LOSSES
from fledge.methods.registry import TOKEN_HEADS


class ObjectiveSection(Section):
    """The `objective` section of a recipe."""

    not_options: ClassVar[frozenset[str]] = frozenset({"kind"})
    """Fields that are not arguments of the method's objective."""

    kind: str
    """The name of the method; declared here so that it is the first field."""

    @property
    @abstractmethod
    def depths(self) -> int:
        """The number of tokens that a draft is trained to propose, and that serving should use."""

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the method's objective."""
        names = set(type(self).model_fields) - self.not_options
        values = {name: getattr(self, name) for name in names}
        return {k: v.loss() if isinstance(v, LossChoice) else v for k, v in values.items()}


class LossChoice(Section, use_attribute_docstrings=False):
    """One of `objective.losses` with its parameters; each loss gets a section with its fields.

    For a class made at run time, pydantic would search the source of every loaded module for
    docstrings: a tenth of a second per loss.
    """

    kind: str = Field(description="The name of the loss.")

    def loss(self) -> Loss:
        return LOSSES[self.kind](**self.model_dump(exclude={"kind"}))


def loss_choices() -> dict[str, type[LossChoice]]:
    """The sections of all losses by name."""
    return {name: _choice_of(name, loss) for name, loss in LOSSES.items()}


@cache
def _choice_of(name: str, loss: type[Loss]) -> type[LossChoice]:
    numbers: dict[str, Any] = {
        number.name: (
            Annotated[Number, Field(**number.metadata["bounds"])],
            Field(number.default, description=number.metadata["about"]),
        )
        for number in fields(loss)  # type: ignore[arg-type]  # every loss is a dataclass
    }
    kind: Any = (
        Literal[name],
        Field(name, description=LossChoice.model_fields["kind"].description),
    )
    return create_model(
        loss.__name__, __base__=LossChoice, __doc__=loss.__doc__, kind=kind, **numbers
    )


class LossSection(ObjectiveSection):
    """The section of a method that trains with any of `objective.losses`."""

    loss: Annotated[LossChoice, Tagged("kind", loss_choices, default="ce", bare=True)] = Field(
        default_factory=lambda: loss_choices()["ce"].model_validate({})
    )
    """The loss on the draft's distribution: a name, or a mapping of kind and parameters."""


# --- EAGLE ----------------------------------------------------------------------------------------


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

    feature_dropout: ShareBelowOne = 0.0
    """Share of the target's features left out in training, drawn anew for every step and slot."""

    @property
    def depths(self) -> int:
        return self.ttt_steps


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

    max_anchors: PositiveCount | None = None
    """At most this many rollouts a pack; null: all."""

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


# --- blocks ---------------------------------------------------------------------------------------


_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # what published drafts were trained with


class BlockSection(ObjectiveSection):
    """All tokens of a block in one pass of a few layers that attend to the target's features."""

    not_options: ClassVar[frozenset[str]] = ObjectiveSection.not_options | {
        *("listened_layers", "block_size", "causal", "sliding_window", "sliding_layers"),
        "mask_token_id",
    }

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
    def placeholder(self) -> int | None:
        return self.mask_token_id

    def options(self) -> dict[str, Any]:
        near = min(_GAMMAS, key=lambda size: abs(size - self.block_size))
        gamma = _GAMMAS[near] * self.block_size / near if self.gamma is None else self.gamma
        return {**super().options(), "gamma": gamma}

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


class TextChoice(LossChoice):
    """Cross entropy with the text's own token: answers should be the target's."""

    kind: Literal["text"] = "text"
    """The name of the loss."""

    def loss(self) -> Loss:
        from fledge.methods.losses.hard import TextCrossEntropy

        return TextCrossEntropy()


def block_losses() -> dict[str, type[LossChoice]]:
    """What a block can be trained with: the text, or the target's distribution."""
    return {"text": TextChoice, **loss_choices()}


class DflashSection(BlockSection):
    """DFlash: a block of masked slots behind the newest token, filled in one pass."""

    kind: Literal["dflash"] = "dflash"
    """Drafts a block at once from the target's features; vLLM and SGLang serve it."""

    loss: Annotated[LossChoice, Tagged("kind", block_losses, default="text", bare=True)] = Field(
        default_factory=TextChoice
    )
    """text: cross entropy with the text's own token, for answers that the target wrote. Or what a
    wrong distribution costs; see below."""

    weights: Literal["decay", "dpace"] = "decay"
    """decay: by `gamma`; dpace: by how likely the block is to be accepted that far (D-PACE), which
    needs the loss text."""

    @property
    def depths(self) -> int:
        return self.block_size - 1

    @model_validator(mode="after")
    def _check_dpace_loss(self) -> "DflashSection":
        if self.weights == "dpace" and self.loss.kind != "text":
            raise ValueError("weights dpace needs the loss text, whose probabilities it weighs by")
        return self


class DsparkSection(BlockSection):
    """DSpark: DFlash's block, drafted left to right through a small Markov head, with a confidence
    that says how far it is worth verifying."""

    kind: Literal["dspark"] = "dspark"
    """Drafts a block in one pass, each token given the one before; vLLM and SGLang serve it."""

    not_options: ClassVar[frozenset[str]] = BlockSection.not_options | {
        "token_head", "markov_rank", "confidence_threshold",
    }  # fmt: skip

    block_size: Annotated[PositiveCount, Field(ge=1, le=1024)] = 7
    """Slots of a block, which are the tokens that it drafts."""

    gamma: Positive | None = 4.0
    """A token k places into the block has weight exp(-k / gamma)."""

    token_head: str = "markov"
    """What makes a token depend on the one before it; markov is what engines read."""

    markov_rank: PositiveCount = 256
    """Width of the token head."""

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

    def draft_settings(self) -> dict[str, object]:
        return {
            **super().draft_settings(),
            "sample_from_anchor": True,
            "token_head": self.token_head,
            "markov_rank": self.markov_rank,
            "confidence_head": self.confidence_weight > 0,
            "confidence_threshold": self.confidence_threshold,
        }

    @field_validator("token_head")
    @classmethod
    def _check_token_head(cls, name: str) -> str:
        if name not in TOKEN_HEADS:
            raise ValueError(f"must be one of {', '.join(TOKEN_HEADS)}, not {name!r}")
        return name
