"""A method: everything that depends on the algorithm, in one object.

Whoever needs to know how a draft is built, trained, decoded, replayed, written for engines or
measured asks its method; nobody else compares an algorithm's name. A method's file imports neither
torch nor another room when it is loaded, because recipes are read before anything heavy is needed:
each function imports what it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fledge.core.settings import Section

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


Said = TypeVar("Said", bound=ObjectiveSection)


@dataclass(frozen=True)
class TrainerInputs:
    """What every objective is given besides its draft and its own section."""

    selected_token_ids: "Tensor"  # [W]
    selected_token_mask: "Tensor"  # [V]
    target_head: "HeadLike"
    compute_dtype: "torch.dtype | None"

    def with_loss(self, loss: str, lk_kl_scale: float, lk_kl_decay: float) -> dict[str, Any]:
        """The same as keyword arguments of a trainer module, with its loss."""
        lk_loss_type = loss.removeprefix("lk_") if loss.startswith("lk_") else None
        return {
            "selected_token_ids": self.selected_token_ids,
            "selected_token_mask": self.selected_token_mask,
            "target_head": self.target_head,
            "compute_dtype": self.compute_dtype,
            "loss": "ce" if lk_loss_type else loss,
            "lk_loss_type": lk_loss_type,
            "lk_kl_scale": lk_kl_scale,
            "lk_kl_decay": lk_kl_decay,
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

    algorithms: ClassVar[Mapping[str, str]]
    """Engine -> what it calls the algorithm when it is started."""

    vllm_settings: ClassVar[Mapping[str, object]] = {}
    """What vLLM's speculative config must say besides."""

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
    def objective(self, section: Said, draft: "DraftModel", given: TrainerInputs) -> "Objective":
        """The draft and its loss, as a training step calls them."""

    def bench_section(self, **flags: Any) -> Said:
        """The section that `fledge bench train` measures, given those of its flags that apply."""
        return self.section(**flags)

    def bench_draft_settings(self, vocab_size: int) -> dict[str, Any]:
        """`draft_settings` for random weights, where there is no tokenizer to ask."""
        return {}

    # --- engines --------------------------------------------------------------------------------

    def version(self, config: Any) -> str:
        """What a draft's card calls it."""
        return self.title
