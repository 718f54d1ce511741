"""The recipe sections of block drafts: one for each small head on the common backbone."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from fledge.core.settings import (
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveShare,
    Share,
    ShareBelowOne,
    Tagged,
)
from fledge.methods.losses.base import Loss
from fledge.methods.registry import TOKEN_HEADS
from fledge.methods.section import LossChoice, ObjectiveSection, loss_choices

_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # what published drafts were trained with


class BlockSection(ObjectiveSection):
    """All tokens of a block in one pass of a few layers that attend to the target's features."""

    not_options: ClassVar[frozenset[str]] = ObjectiveSection.not_options | {
        *("listened_layers", "block_size", "causal", "sliding_window", "sliding_layers"),
        *("sliding_both_ways", "mask_token_id"),
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
    """Tokens that these layers attend to."""

    sliding_both_ways: bool = False
    """Slots of sliding layers see the whole block, as in published DFlash 2 drafts; engines take it
    only for all layers of a draft at once. Otherwise they are causal."""

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
            "sliding_both_ways": self.sliding_both_ways and bool(self.sliding_layers),
            "num_aux_hidden_states": self.listened_layers,
        }


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


class DominoSection(BlockSection):
    """Domino: DFlash's block, drafted left to right through a GRU over the tokens so far."""

    kind: Literal["domino"] = "domino"
    """Drafts a block in one pass, each token given all before it; SGLang serves it."""

    not_options: ClassVar[frozenset[str]] = BlockSection.not_options | {"rank", "gru_hidden_dim"}

    rank: PositiveCount = 256
    """Width of the correction, as in the paper."""

    gru_hidden_dim: PositiveCount = 1024
    """Width of the GRU's state, as in the paper."""

    plain_weight: Share = 1.0
    """Weight of the uncorrected logits' loss in the first step; the rest is on the corrected
    ones'."""

    plain_share: PositiveShare = 1.0
    """Share of all steps over which that weight falls to 0: all of them, as in every published
    recipe."""

    @property
    def depths(self) -> int:
        return self.block_size

    def draft_settings(self) -> dict[str, object]:
        return {
            **super().draft_settings(),
            "sample_from_anchor": True,
            "token_head": "domino",
            "markov_rank": self.rank,
            "gru_hidden_dim": self.gru_hidden_dim,
        }


class XpressSection(BlockSection):
    """XPress: DFlash's block, refined by parallel passes: every token reads all before it."""

    kind: Literal["xpress"] = "xpress"
    """Drafts a block in one pass and refines it a few times; vLLM 0.33 serves it."""

    not_options: ClassVar[frozenset[str]] = BlockSection.not_options | {"rank", "passes"}

    gamma: Positive | None = 4.0
    """A token k places into the block has weight exp(-k / gamma): the original's, for all sizes."""

    rank: PositiveCount = 256
    """Width of the head, as in the paper."""

    passes: PositiveCount = 6
    """Refinements when decoding, as in the paper: exact for the first 6 tokens of a block."""

    rounds: Count = 3
    """Refinements whose own errors are trained on, as in the paper; each costs a sweep over the
    vocabulary."""

    round_weight: NonNegative = 0.3
    """Weight of their mean loss."""

    plain_weight: NonNegative = 0.6
    """Weight of the loss of the unrefined logits."""

    @property
    def depths(self) -> int:
        return self.block_size - 1

    def draft_settings(self) -> dict[str, object]:
        return {
            **super().draft_settings(),
            "token_head": "xpress",
            "markov_rank": self.rank,
            "num_jacobi_passes": self.passes,
        }


class ConvolvedSection(DflashSection):
    """What DFlash 2 and LiLiCorr share: DFlash's loss, perhaps convolutions, a choice among the
    best tokens of every slot."""

    not_options: ClassVar[frozenset[str]] = BlockSection.not_options | {
        "convolutions",
        "candidates",
    }

    convolutions: bool = True
    """Gated convolutions of two taps around every sublayer, along the slots of a block; on equal
    data they gained 0.1 to 0.2 of acceptance length."""

    candidates: PositiveCount = 16
    """Best tokens of a slot that the head chooses among; vLLM needs a power of two up to 16."""

    def draft_settings(self) -> dict[str, object]:
        return {
            **super().draft_settings(),
            "conv_kernel_size": 2 if self.convolutions else 0,
            "candidates": self.candidates,
        }


class Dflash2Section(ConvolvedSection):
    """DFlash 2: DFlash with convolutions inside the block and a selector that walks over the best
    tokens of every slot."""

    kind: Literal["dflash2"] = "dflash2"  # type: ignore[assignment]
    """DFlash with convolutions and a selector; vLLM and SGLang serve it."""

    not_options: ClassVar[frozenset[str]] = ConvolvedSection.not_options | {"selector_rank"}

    block_size: Annotated[PositiveCount, Field(ge=2, le=1024)] = 8
    """Slots of a block: those of published DFlash 2 drafts."""

    selector_rank: PositiveCount = 256
    """Width of the selector, as in published drafts."""

    selector_weight: NonNegative = 1.0
    """Weight of the selector's cross entropy, as in all trainers."""

    missing: Literal["replace", "skip"] = "replace"
    """If the right token is not among the candidates: replace the last one by it, as speculators
    and ModelOpt do, so that every slot trains the selector; or skip the slot, as AutoModel does."""

    def draft_settings(self) -> dict[str, object]:
        settings = {"candidate_head": "selector", "selector_rank": self.selector_rank}
        return super().draft_settings() | settings


class LilicorrSection(ConvolvedSection):
    """LiLiCorr: DFlash with a small transformer over the best tokens of all slots, which scores
    their pairs."""

    kind: Literal["lilicorr"] = "lilicorr"  # type: ignore[assignment]
    """DFlash with a lattice of candidates; vLLM and SGLang serve it."""

    not_options: ClassVar[frozenset[str]] = ConvolvedSection.not_options | {
        "lattice_width", "lattice_layers", "factor_dim",
    }  # fmt: skip

    lattice_width: Count = 1024
    """Width of the lattice's transformer, as in the paper; 0: the draft's."""

    lattice_layers: PositiveCount = 2
    """Its layers, as in the paper."""

    factor_dim: PositiveCount = 1024
    """Width of the vectors whose products are the scores, as in the paper."""

    pair_weight: NonNegative = 0.25
    """Weight of the cross entropy among candidates, as in the paper."""

    target_weight: NonNegative = 0.25
    """Weight of the penalty for scores on tokens that the target finds less likely than the text's,
    as in the paper."""

    def draft_settings(self) -> dict[str, object]:
        return {
            **super().draft_settings(),
            "candidate_head": "lilicorr",
            "lilicorr_hidden_size": self.lattice_width,
            "lilicorr_num_layers": self.lattice_layers,
            "lilicorr_factor_dim": self.factor_dim,
        }
