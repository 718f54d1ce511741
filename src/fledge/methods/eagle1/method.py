"""EAGLE-1 and EAGLE-2: the draft predicts the target's last hidden state, and the target's own head
reads it. They train the same weights; EAGLE-2 drafts a tree of the likeliest continuations.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import Method, stated
from fledge.methods.eagle3.method import CHAIN, TREE
from fledge.methods.shared.config import WITHOUT_NORMS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.methods.shared.draft import DraftModel, Reading


class Eagle1(Method):
    name = "eagle1"
    title = "EAGLE-1"
    section_path = "fledge.methods.eagle1.section:Eagle1Section"
    draft_path = "fledge.methods.eagle1.draft:LlamaEagle1DraftModel"
    objective_path = "fledge.methods.eagle1.objective:Eagle1TrainerModule"
    splits_rows = True
    config_version: ClassVar[int] = 1
    """`eagle_version` in its drafts' configs."""

    fixed_draft: ClassVar[Mapping[str, Any]] = {
        "draft_vocab_size": None,
        "head_from_target": True,
        "layers_from_target": False,
        "freeze_embeddings": True,
        **WITHOUT_NORMS,
    }
    strategies = Registry("strategy", CHAIN | TREE)
    formats = Registry(
        "engine",
        {
            "vllm": "fledge.formats.codec:EAGLE1_VLLM",
            "sglang": "fledge.formats.codec:EAGLE1_SGLANG",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "eagle", "sglang": "EAGLE"}

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(stated(config, "eagle_version") == self.config_version)

    def aux_layers(self, section: Any = None) -> int:
        return 1  # the state after the final norm

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        return {"eagle_version": self.config_version, "num_aux_hidden_states": 1}

    def grow(self, draft: "DraftModel", config: "PretrainedConfig") -> "DraftModel | None":
        if not isinstance(draft, self.draft_type()):
            return None
        draft.config.eagle_version = self.config_version  # the weights mean the same in both
        return draft

    def reading(self, draft: Any) -> "Reading":
        from fledge.methods.shared.draft import Reading, wide

        _, state_EE = draft.fc.weight.chunk(2, dim=1)  # the other half reads the token
        return Reading(state_EE, wide, feeds_back=True)

    def bench_options(self, *, depths: int = 0, **_: Any) -> dict[str, Any]:
        return {"draft_tokens": depths or 5}


class Eagle2(Eagle1):
    name = "eagle2"
    title = "EAGLE-2"
    section_path = "fledge.methods.eagle1.section:Eagle2Section"
    config_version = 2
    strategies = Registry("strategy", TREE | CHAIN)

    def sglang_flags(self, num_draft_tokens: int) -> list[str]:
        from fledge.decode.strategy import TreeShape

        tree, count = TreeShape(), "--speculative-num-draft-tokens"
        steps = ["--speculative-num-steps", str(num_draft_tokens)]
        return [*steps, "--speculative-eagle-topk", str(tree.width), count, str(tree.nodes + 1)]


EAGLE1, EAGLE2 = Eagle1(), Eagle2()
