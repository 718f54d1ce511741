"""EAGLE-3 and EAGLE-3.1: one token after another, each from the draft's own last state."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fledge.core.settings import PositiveCount, PositiveShare
from fledge.methods.base import LossSection, Method, TrainerInputs

if TYPE_CHECKING:
    from fledge.draft.base import DraftModel
    from fledge.objective.base import Objective

AUX_LAYERS = 3  # low, middle, high


class Eagle3Section(LossSection):
    """EAGLE-3: training-time test, each step from the draft's own output."""

    kind: Literal["eagle3"] = "eagle3"
    """Drafts tokens one after another; every engine serves it."""

    ttt_steps: PositiveCount = 7
    """Steps unrolled in training: as many as tokens drafted in serving."""

    step_decay: PositiveShare = 0.8
    """Weight of step k is step_decay ** k."""

    depth_keep: PositiveShare = 1.0
    """Chance that a rollout is followed one step deeper; 0.7 halves the draft's work, same mean."""

    @property
    def depths(self) -> int:
        return self.ttt_steps


class Eagle3(Method[Eagle3Section]):
    name = "eagle3"
    title = "EAGLE-3"
    section = Eagle3Section
    strategies = ("chain", "tree")
    formats: ClassVar[Mapping[str, str]] = {
        "vllm": "plain-vllm",
        "sglang": "plain-sglang",
        "speculators": "speculators-eagle3",
    }

    def owns(self, config: Any) -> bool:
        return True  # what says nothing else of itself

    def draft_type(self) -> "type[DraftModel]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel

        return LlamaEagle3DraftModel

    def aux_layers(self, section: Any) -> int:
        return AUX_LAYERS

    def default_aux_layer_ids(self, depth: int, count: int) -> list[int]:
        from fledge.target.layers import default_aux_layer_ids

        return default_aux_layer_ids(depth)

    def objective(
        self, section: Eagle3Section, draft: "DraftModel", given: TrainerInputs
    ) -> "Objective[Any]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel
        from fledge.objective.eagle3 import Eagle3TrainerModule

        assert isinstance(draft, LlamaEagle3DraftModel)
        return Eagle3TrainerModule(
            draft,
            ttt_steps=section.ttt_steps,
            step_decay=section.step_decay,
            depth_keep=section.depth_keep,
            **given.with_loss(section.loss),
        )

    def bench_section(self, *, depths: int = 0, depth_keep: float = 1.0, **_: Any) -> Eagle3Section:
        return Eagle3Section(ttt_steps=depths or 7, depth_keep=depth_keep)

    def version(self, config: Any) -> str:
        return "EAGLE-3.1" if config.fc_norm or config.norm_output else self.title


EAGLE3 = Eagle3()
