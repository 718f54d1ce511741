"""EAGLE-3 and EAGLE-3.1: one token after another, each from the draft's own last state."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import Method, TrainerInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.decode.strategy import Strategy
    from fledge.formats.codec import Format
    from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
    from fledge.methods.section import LossSection
    from fledge.methods.shared.draft import Reading
    from fledge.methods.shared.objective import Objective

CHAIN = {"chain": "fledge.methods.eagle3.decoding:Chain"}
TREE = {"tree": "fledge.decode.tree:Tree"}
FORMATS = {
    "vllm": "fledge.formats.codec:PLAIN_VLLM",
    "sglang": "fledge.formats.codec:PLAIN_SGLANG",
    "speculators": "fledge.formats.codec:SPECULATORS_EAGLE3",
}


class Eagle3(Method):
    name = "eagle3"
    title = "EAGLE-3"
    splits_rows = True
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry("strategy", CHAIN | TREE)
    formats: ClassVar[Mapping[str, "Format"]] = Registry("engine", FORMATS)
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "eagle3", "sglang": "EAGLE3"}

    @property
    def section(self) -> "type[LossSection]":
        from fledge.methods.eagle3.section import Eagle3Section

        return Eagle3Section

    def owns(self, config: "PretrainedConfig") -> bool:
        return True  # the default: no other method claims the config

    def draft_type(self) -> "type[LlamaEagle3DraftModel]":
        from fledge.methods.eagle3.draft import LlamaEagle3DraftModel

        return LlamaEagle3DraftModel

    def aux_layers(self, section: Any = None) -> int:
        return 3  # low, middle, high

    def reading(self, draft: Any) -> "Reading":
        from fledge.methods.shared.draft import Reading, wide

        return Reading(draft.fc.weight, lambda aux: draft.fc_inputs(wide(aux)))

    def objective(self, draft: Any, given: TrainerInputs, **options: Any) -> "Objective[Any]":
        from fledge.methods.eagle3.objective import Eagle3TrainerModule

        return Eagle3TrainerModule(draft, **given.arguments(), **options)

    def bench_options(
        self, *, depths: int = 0, depth_keep: float = 1.0, **_: Any
    ) -> dict[str, Any]:
        return {"ttt_steps": depths or 7, "depth_keep": depth_keep}

    def version(self, config: "PretrainedConfig") -> str:
        return "EAGLE-3.1" if config.fc_norm or config.norm_output else self.title


EAGLE3 = Eagle3()
