"""DFlash's section of a recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fledge.core.settings import Tagged
from fledge.methods.block_section import BlockSection
from fledge.methods.section import LossChoice, loss_choices
from fledge.objective.losses.base import Loss


class TextChoice(LossChoice):
    """Cross entropy with the text's own token: answers should be the target's."""

    kind: Literal["text"] = "text"
    """The name of the loss."""

    def loss(self) -> Loss:
        from fledge.objective.losses.text import TextCrossEntropy

        return TextCrossEntropy()


def block_losses() -> dict[str, type[LossChoice]]:
    """What a block can be trained with: the text, or the target's distribution."""
    return {"text": TextChoice, **loss_choices()}


class DflashSection(BlockSection):
    """DFlash: a block of masked slots behind the newest token, filled in one pass."""

    kind: Literal["dflash"] = "dflash"
    """Drafts a block at once from the target's features; vLLM and SGLang serve it."""

    not_options = BlockSection.not_options | {"loss"}

    loss: Annotated[LossChoice, Tagged("kind", block_losses, default="text", bare=True)] = Field(
        default_factory=TextChoice
    )
    """text: cross entropy with the text's own token, for answers that the target wrote. Or what a
    wrong distribution costs; see below."""

    weights: Literal["decay", "dpace"] = "decay"
    """decay: by `gamma`; dpace: by how likely the block is to be accepted that far (D-PACE), which
    needs the loss text."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "loss": self.loss.loss()}

    @property
    def depths(self) -> int:
        return self.block_size - 1

    @property
    def reads_target(self) -> bool:
        return self.loss.kind != "text"

    @model_validator(mode="after")
    def _check_dpace_loss(self) -> "DflashSection":
        if self.weights == "dpace" and self.loss.kind != "text":
            raise ValueError("weights dpace needs the loss text, whose probabilities it weighs by")
        return self
