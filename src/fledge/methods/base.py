"""A method: everything that depends on the algorithm, in one object.

All code that depends on how a draft is built, trained, decoded, replayed, exported or measured goes
through its method; no other code compares the names of algorithms. A method's file imports no other
package at load time; each function imports what it returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import imported

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

    from fledge.core.errors import BadInput
    from fledge.core.head import HeadLike
    from fledge.decode.strategy import Strategy
    from fledge.formats.codec import Feature, Format, PlainDraft, TargetFacts
    from fledge.formats.foreign import DraftView
    from fledge.methods.section import ObjectiveSection
    from fledge.methods.shared.draft import DraftModel, Reading
    from fledge.methods.shared.objective import Objective
    from fledge.rollout.context import ContextRanks


@dataclass(frozen=True)
class TrainerInputs:
    """The inputs of every objective besides its draft and the options of its section."""

    selected_token_ids: "Tensor"  # [W]
    selected_token_mask: "Tensor"  # [V]
    target_head: "HeadLike"
    compute_dtype: "torch.dtype | None"
    context: "ContextRanks | None" = None  # only for methods that split rows

    def arguments(self) -> dict[str, Any]:
        """These inputs as keyword arguments of a trainer module."""
        arguments = dict(vars(self))
        if self.context is None:  # not every method accepts it
            del arguments["context"]
        return arguments


def stated(config: Any, key: str) -> Any:
    """A key of a config; None if the config does not state it."""
    return getattr(config, key, None)


class Method(ABC):
    """One algorithm."""

    name: ClassVar[str]
    """`objective.kind` of its recipes."""

    title: ClassVar[str]
    """Its name in prose."""

    # Import paths ("package.module:Class"): a recipe is read without torch, a step runs without
    # pydantic.

    section_path: ClassVar[str]
    """Of its recipe section."""

    draft_path: ClassVar[str]
    """Of its drafts."""

    objective_path: ClassVar[str]
    """Of its trainer module."""

    depths_key: ClassVar[str] = "draft_tokens"
    """The key of a draft's config for the number of tokens that it was trained to propose."""

    draft_defaults: ClassVar[Mapping[str, Any]] = {}
    """Keys of the draft's section whose defaults differ from the usual ones."""

    fixed_draft: ClassVar[Mapping[str, Any]] = {}
    """Keys of the draft's section whose values are fixed."""

    carries_states: ClassVar[bool] = True
    """Whether its drafts carry a state from depth to depth."""

    splits_rows: ClassVar[bool] = False
    """Whether several ranks can train on the same rows, each on a part (`training.context`); its
    objective then takes `context`."""

    strategies: ClassVar[Mapping[str, "type[Strategy]"]]
    """Drafting strategies for its drafts (`decode.strategy`) by name, its own first."""

    formats: ClassVar[Mapping[str, "Format"]]
    """Engine -> the format in which its drafts are exported."""

    algorithms: ClassVar[Mapping[str, str]]
    """Engine -> the engine's own name for the algorithm, given when it is started."""

    vllm_settings: ClassVar[Mapping[str, object]] = {}
    """Further entries that vLLM's speculative config needs."""

    vllm_flags: ClassVar[Sequence[str]] = ()
    """Further flags of `vllm serve`."""

    @property
    def own_strategy(self) -> str:
        """The strategy that it trains for."""
        return next(iter(self.strategies))

    @property
    def replayed_strategy(self) -> str | None:
        """The first strategy that can be replayed; None if no strategy can."""
        strategies = self.strategies
        return next((name for name in strategies if strategies[name].rollouts is not None), None)

    # --- its recipe -----------------------------------------------------------------------------

    @property
    def section(self) -> "type[ObjectiveSection]":
        """The class of its recipe section."""
        section: type[ObjectiveSection] = imported(self.section_path)
        return section

    # --- the draft ------------------------------------------------------------------------------

    @abstractmethod
    def owns(self, config: "PretrainedConfig") -> bool:
        """Whether a draft with this config belongs to this method."""

    def draft_type(self) -> "type[DraftModel]":
        """The class of its drafts."""
        draft: type[DraftModel] = imported(self.draft_path)
        return draft

    @abstractmethod
    def aux_layers(self, section: "ObjectiveSection | None" = None) -> int:
        """The number of aux layers that its drafts read; without a section, the default."""

    def default_layers(self, depth: int, count: int) -> list[int]:
        """The `count` layers that are read by default, of a target with `depth` layers."""
        from fledge.target.layers import default_aux_layer_ids

        return default_aux_layer_ids(depth, count)

    def draft_settings(
        self, section: "ObjectiveSection | None", *, tokenizer: Any, vocab_size: int
    ) -> dict[str, Any]:
        """Additional entries of its drafts' configs, for `derive_draft_config`. For random weights
        there is no tokenizer; without a section, the entries are those of `fledge bench train`."""
        return {}

    def derive(self, target_config: "PretrainedConfig", **keys: Any) -> "PretrainedConfig":
        """The config of a draft for this target; `keys` as of `derive_draft_config`."""
        from fledge.methods.shared.config import derive_draft_config

        return derive_draft_config(target_config, **keys)

    def start_from_target(self, draft: "DraftModel", model: "Path") -> None:
        """Load the draft that a model ships in its own files (`draft.init_from=target`)."""
        from fledge.core.errors import BadInput

        what, where = f"no model ships a draft of {self.title}", "draft.init_from=target"
        raise BadInput(what, where=where, fix="objective.kind=mtp")

    def grow(self, draft: "DraftModel", config: "PretrainedConfig") -> "DraftModel | None":
        """A draft of `config` initialized from another method's draft; None if it cannot be."""
        return None

    def reading(self, draft: "DraftModel") -> "Reading | None":
        """How its drafts read the target's states, for a refit to another target; None if not
        through a single linear map."""
        return None

    # --- training -------------------------------------------------------------------------------

    def objective(
        self, draft: "DraftModel", given: TrainerInputs, **options: Any
    ) -> "Objective[Any]":
        """The draft with its loss, as called by a training step; `options` are its section's."""
        objective: Objective[Any] = imported(self.objective_path)(
            draft, **given.arguments(), **options
        )
        return objective

    def bench_options(self, **flags: Any) -> dict[str, Any]:
        """`options` for `fledge bench train`, given its flags (0 means the default)."""
        return {}

    # --- engines --------------------------------------------------------------------------------

    def sglang_flags(self, num_draft_tokens: int) -> list[str]:
        """SGLang's flags for what a round drafts."""
        count = str(num_draft_tokens + 1)  # SGLang counts the newest known token too
        steps = ["--speculative-num-steps", str(num_draft_tokens)]
        return [*steps, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", count]

    def version(self, config: "PretrainedConfig") -> str:
        """The name of the method on a draft's model card."""
        return self.title

    def foreign(self) -> "type[DraftView]":
        """How drafts of other trainers are recognized and read, checked and converted."""
        from fledge.formats.foreign import DraftView

        return DraftView

    def export_features(self, config: "PretrainedConfig") -> "dict[Feature, bool]":
        """Further features that an engine must support, and those that count differently."""
        return {}

    def refused_tokens(self, config: "PretrainedConfig", asked: int) -> "BadInput | None":
        """Why a draft cannot be served with this number of drafted tokens; None if it can."""
        return None

    def refused_target(
        self, config: "PretrainedConfig", engine: str, target: "TargetFacts"
    ) -> "BadInput | None":
        """Why an engine cannot serve a draft with this target; None if it can."""
        return None

    def with_target_rows(self, draft: "PlainDraft", head_VE: "Tensor | None") -> "PlainDraft":
        """The draft with what its files contain of the target's head; None: it is not known."""
        return draft
