"""A method: everything that depends on the algorithm, in one object.

All code that depends on how a draft is built, trained, decoded, replayed, exported or measured asks
its method; no other code compares an algorithm's name. A method's file imports no other
room when it is loaded: recipes are read without torch, steps run without pydantic. Each function
imports what it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fledge.core.head import HeadLike
    from fledge.decode.strategies.base import Strategy
    from fledge.draft.base import DraftModel
    from fledge.draft.reading import Reading
    from fledge.methods.section import ObjectiveSection
    from fledge.objective.base import Objective
    from fledge.objective.work import Work
    from fledge.rollout.context import ContextRanks


@dataclass(frozen=True)
class TrainerInputs:
    """What every objective is given besides its draft and its own section."""

    selected_token_ids: "Tensor"  # [W]
    selected_token_mask: "Tensor"  # [V]
    target_head: "HeadLike"
    compute_dtype: "torch.dtype | None"
    context: "ContextRanks | None" = None  # only for methods that split rows

    def arguments(self) -> dict[str, Any]:
        """The same as keyword arguments of a trainer module."""
        given = dict(vars(self))
        if self.context is None:  # not every method knows the word
            del given["context"]
        return given


class Method(ABC):
    """One algorithm."""

    name: ClassVar[str]
    """`objective.kind` of its recipes."""

    title: ClassVar[str]
    """As people write it."""

    draft_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults for keys of the draft's section that differ from the usual ones."""

    fixed_draft: ClassVar[Mapping[str, Any]] = {}
    """Keys of the draft's section that can have no other value."""

    carries_states: ClassVar[bool] = True
    """Whether its drafts carry a state from depth to depth."""

    splits_rows: ClassVar[bool] = False
    """Whether several ranks can train on the same rows, each on a part (`training.context`): its
    objective takes `context`."""

    strategies: ClassVar[Mapping[str, "type[Strategy]"]]
    """The ways in which its drafts propose (`decode.strategies`) by name, its own first."""

    formats: ClassVar[Mapping[str, str]]
    """Engine -> the layout in which its drafts are written for it (`export.formats`)."""

    algorithms: ClassVar[Mapping[str, str]]
    """Engine -> what it calls the algorithm when it is started."""

    vllm_settings: ClassVar[Mapping[str, object]] = {}
    """What vLLM's speculative config must say besides."""

    @property
    def own_strategy(self) -> str:
        """The way of drafting that it trains for."""
        return next(iter(self.strategies))

    @property
    def replayed_strategy(self) -> str | None:
        """The way of drafting in which texts are replayed: its own, if that has a replay."""
        known = self.strategies
        return next((name for name in known if known[name].rollouts is not None), None)

    # --- its recipe -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def section(self) -> "type[ObjectiveSection]":
        """Its section of a recipe."""

    # --- the draft ------------------------------------------------------------------------------

    @abstractmethod
    def owns(self, config: Any) -> bool:
        """Whether a draft with this config is one of this method's."""

    @abstractmethod
    def draft_type(self) -> "type[DraftModel]":
        """The class of its drafts."""

    @abstractmethod
    def aux_layers(self, section: "ObjectiveSection | None" = None) -> int:
        """How many of the target's layers its drafts listen to; without a section, the usual."""

    def default_layers(self, depth: int, count: int) -> list[int]:
        """Which `count` layers of a target of `depth` they are, where nobody says."""
        from fledge.target.layers import default_aux_layer_ids

        return default_aux_layer_ids(depth, count)

    def draft_settings(
        self, section: "ObjectiveSection", *, tokenizer: Any, vocab_size: int
    ) -> dict[str, Any]:
        """What its drafts' configs hold besides the usual, for `derive_draft_config`."""
        return {}

    def grow(self, draft: "DraftModel", config: Any) -> "DraftModel | None":
        """A draft of `config` that starts from another method's; None: it cannot."""
        return None

    def reading(self, draft: "DraftModel") -> "Reading | None":
        """How its drafts read the target's states, for a refit to another target; None: not by one
        linear map."""
        return None

    # --- training -------------------------------------------------------------------------------

    @abstractmethod
    def objective(
        self, draft: "DraftModel", given: TrainerInputs, **options: Any
    ) -> "Objective[Any]":
        """The draft and its loss, as a training step calls them; `options` as its section has."""

    def work(self, draft: "DraftModel", said: Any) -> "Work":
        """What a step computes and keeps, for predictions and benchmarks: of a section, or of an
        objective, which answer to the same names."""
        from fledge.objective.work import ChainWork

        return ChainWork(draft, said.depths)

    def bench_options(self, **flags: Any) -> dict[str, Any]:
        """`options` for `fledge bench train`, given its flags (0: the usual)."""
        return {}

    def bench_draft_settings(
        self, vocab_size: int, section: "ObjectiveSection | None" = None
    ) -> dict[str, Any]:
        """`draft_settings` for random weights, where there is no tokenizer to ask; without a
        section, of what `fledge bench train` measures."""
        return {}

    # --- engines --------------------------------------------------------------------------------

    def sglang_flags(self, num_draft_tokens: int) -> list[str]:
        """How SGLang is told what a round drafts."""
        count = str(num_draft_tokens + 1)  # the newest known token is counted
        steps = ["--speculative-num-steps", str(num_draft_tokens)]
        return [*steps, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", count]

    def version(self, config: Any) -> str:
        """What a draft's card calls it."""
        return self.title
