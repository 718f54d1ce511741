"""EAGLE-3 and EAGLE-3.1: one token after another, each from the draft's own last state."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import Method, TrainerInputs

if TYPE_CHECKING:
    from fledge.decode.strategies.base import Strategy
    from fledge.draft.base import DraftModel
    from fledge.draft.eagle3 import LlamaEagle3DraftModel
    from fledge.draft.reading import Reading
    from fledge.methods.section import LossSection
    from fledge.objective.base import Objective
    from fledge.objective.work import Work

CHAIN = {"chain": "fledge.decode.strategies.chain:Chain"}
TREE = {"tree": "fledge.decode.strategies.tree:Tree"}


class Eagle3(Method):
    name = "eagle3"
    title = "EAGLE-3"
    splits_rows = True
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry("strategy", CHAIN | TREE)
    formats: ClassVar[Mapping[str, str]] = {
        "vllm": "plain-vllm",
        "sglang": "plain-sglang",
        "speculators": "speculators-eagle3",
    }
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "eagle3", "sglang": "EAGLE3"}

    @property
    def section(self) -> "type[LossSection]":
        from fledge.methods.eagle3_section import Eagle3Section

        return Eagle3Section

    def owns(self, config: Any) -> bool:
        return True  # the default: no other method claims the config

    def draft_type(self) -> "type[LlamaEagle3DraftModel]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel

        return LlamaEagle3DraftModel

    def aux_layers(self, section: Any = None) -> int:
        return 3  # low, middle, high

    def reading(self, draft: Any) -> "Reading":
        from fledge.draft.reading import Reading, wide

        return Reading(draft.fc.weight, lambda aux: draft.fc_inputs(wide(aux)))

    def objective(self, draft: Any, given: TrainerInputs, **options: Any) -> "Objective[Any]":
        from fledge.objective.eagle3 import Eagle3TrainerModule

        return Eagle3TrainerModule(draft, **given.arguments(), **options)

    def work(self, draft: "DraftModel", settings: Any) -> "Work":
        from fledge.objective.chain_work import ChainWork
        from fledge.objective.eagle3 import layout
        from fledge.objective.work import Layouts

        whole = layout(settings, training=False)
        layouts = Layouts(layout(settings, training=True), whole, whole)
        return ChainWork(draft, layouts, copies_states=settings.feature_dropout > 0)

    def bench_options(
        self, *, depths: int = 0, depth_keep: float = 1.0, **_: Any
    ) -> dict[str, Any]:
        return {"ttt_steps": depths or 7, "depth_keep": depth_keep}

    def version(self, config: Any) -> str:
        return "EAGLE-3.1" if config.fc_norm or config.norm_output else self.title


EAGLE3 = Eagle3()
