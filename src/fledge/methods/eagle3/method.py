"""EAGLE-3 and EAGLE-3.1: one token after another, each from the draft's own last state."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import Method

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.methods.shared.draft import Reading

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
    section_path = "fledge.methods.eagle3.section:Eagle3Section"
    draft_path = "fledge.methods.eagle3.draft:LlamaEagle3DraftModel"
    objective_path = "fledge.methods.eagle3.objective:Eagle3TrainerModule"
    depths_key = "ttt_steps"
    splits_rows = True
    strategies = Registry("strategy", CHAIN | TREE)
    formats = Registry("engine", FORMATS | {"llama.cpp": "fledge.formats.gguf_layout:EAGLE3_GGUF"})
    algorithms: ClassVar[Mapping[str, str]] = {
        "vllm": "eagle3", "sglang": "EAGLE3", "llama.cpp": "draft-eagle3",
    }  # fmt: skip

    def owns(self, config: "PretrainedConfig") -> bool:
        return True  # the default: no other method claims the config

    def aux_layers(self, section: Any = None) -> int:
        return 3  # low, middle, high

    def reading(self, draft: Any) -> "Reading | None":
        from fledge.methods.shared.draft import Reading, wide

        return Reading(draft.fc.weight, lambda aux: draft.fc_inputs(wide(aux)))

    def bench_options(
        self, *, depths: int = 0, depth_keep: float = 1.0, **_: Any
    ) -> dict[str, Any]:
        return {"ttt_steps": depths or 7, "depth_keep": depth_keep}

    def version(self, config: "PretrainedConfig") -> str:
        spec = self.draft_type().config_type.of(config)
        return "EAGLE-3.1" if spec.extra_norms else self.title


EAGLE3 = Eagle3()
