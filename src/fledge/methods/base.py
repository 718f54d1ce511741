"""A method: everything that depends on the algorithm, in one object.

Whoever needs to know how a draft is built, trained, decoded, replayed, written for engines or
measured asks its method; nobody else compares an algorithm's name. A method's file imports neither
torch nor another room when it is loaded, because recipes are read before anything heavy is needed:
each function imports what it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import Field, model_validator

from fledge.core.settings import NonNegative, Section, Share, Tagged
from fledge.objective.losses.base import Loss
from fledge.objective.losses.cross_entropy import CrossEntropy
from fledge.objective.losses.lk_lambda import LkLambda
from fledge.objective.losses.registry import LOSSES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fledge.core.head import HeadLike
    from fledge.draft.base import DraftModel
    from fledge.objective.base import Objective


class ObjectiveSection(Section):
    """What a recipe says under `objective`; each method has its own."""

    kind: str
    """Each method says its own name; it stands here so that it comes first."""

    @property
    def depths(self) -> int:
        """Tokens that a draft is trained to propose: as many as serving should ask for."""
        raise NotImplementedError


class LossSection(ObjectiveSection):
    """The section of a method that trains with any of `objective.losses`."""

    loss: Annotated[Loss, Tagged("kind", lambda: LOSSES, default="ce", bare=True)] = CrossEntropy()
    """What a wrong distribution costs: a name, or a mapping of kind and parameters; see below."""

    lk_kl_scale: Share | None = Field(default=None, exclude=True)
    """Older spelling of loss.scale."""

    lk_kl_decay: NonNegative | None = Field(default=None, exclude=True)
    """Older spelling of loss.decay."""

    @model_validator(mode="after")
    def _read_older_spellings(self) -> Self:
        """They belong to lk_lambda and mean nothing to other losses. Recipes of earlier versions
        hold their defaults where nobody asked for them, so a default yields to the new spelling."""
        older = {"scale": self.lk_kl_scale, "decay": self.lk_kl_decay}
        loss = self.loss
        for name, value in older.items():
            if value is None or not isinstance(loss, LkLambda):
                continue
            if name not in self.loss.model_fields_set:
                loss = loss.model_copy(update={name: value})
            elif value not in (getattr(loss, name), LkLambda.model_fields[name].default):
                said = getattr(loss, name)
                raise ValueError(
                    f"loss.{name} is {said}, but lk_kl_{name}, its older spelling, is {value}; "
                    "leave one out"
                )
        self.__dict__.update(loss=loss, lk_kl_scale=None, lk_kl_decay=None)  # still being built
        return self


Said = TypeVar("Said", bound=ObjectiveSection)


@dataclass(frozen=True)
class TrainerInputs:
    """What every objective is given besides its draft and its own section."""

    selected_token_ids: "Tensor"  # [W]
    selected_token_mask: "Tensor"  # [V]
    target_head: "HeadLike"
    compute_dtype: "torch.dtype | None"

    def with_loss(self, loss: Loss) -> dict[str, Any]:
        """The same as keyword arguments of a trainer module, with its loss."""
        return {
            "selected_token_ids": self.selected_token_ids,
            "selected_token_mask": self.selected_token_mask,
            "target_head": self.target_head,
            "compute_dtype": self.compute_dtype,
            "loss": loss,
        }


class Method(ABC, Generic[Said]):
    """One algorithm."""

    name: ClassVar[str]
    """`objective.kind` of its recipes."""

    title: ClassVar[str]
    """As people write it."""

    section: type[Said]
    """Its section of a recipe."""

    draft_defaults: ClassVar[Mapping[str, object]] = {}
    """Keys of the draft's section where a recipe is silent, if not the usual ones."""

    strategies: ClassVar[tuple[str, ...]]
    """Names of the ways in which its drafts propose (`decode.strategies`), its own first."""

    formats: ClassVar[Mapping[str, str]]
    """Engine -> the layout in which its drafts are written for it (`export.formats`)."""

    serving: ClassVar[Mapping[str, object]] = {}
    """What vLLM's speculative config says besides the usual."""

    # --- the draft ------------------------------------------------------------------------------

    @abstractmethod
    def owns(self, config: Any) -> bool:
        """Whether a draft with this config is one of this method's."""

    @abstractmethod
    def draft_type(self) -> "type[DraftModel]":
        """The class of its drafts."""

    @abstractmethod
    def aux_layers(self, section: Said) -> int:
        """How many of the target's layers its drafts listen to."""

    @abstractmethod
    def default_aux_layer_ids(self, depth: int, count: int) -> list[int]:
        """Which layers of a target with `depth` layers, where nobody says."""

    def draft_settings(self, section: Said, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        """What its drafts' configs hold besides the usual, for `derive_draft_config`."""
        return {}

    def grow(self, draft: "DraftModel", config: Any) -> "DraftModel | None":
        """A draft of `config` that starts from another method's; None: it cannot."""
        return None

    # --- training -------------------------------------------------------------------------------

    @abstractmethod
    def objective(
        self, section: Said, draft: "DraftModel", given: TrainerInputs
    ) -> "Objective[Any]":
        """The draft and its loss, as a training step calls them."""

    @abstractmethod
    def bench_section(self, **wanted: Any) -> Said:
        """The section that `fledge bench train` measures; `wanted` as its flags say."""

    # --- engines --------------------------------------------------------------------------------

    def version(self, config: Any) -> str:
        """What a draft's card calls it."""
        return self.title


def layers_text(ids: Sequence[int]) -> str:
    """Layer ids as a flag or an override takes them."""
    return ",".join(map(str, ids))
