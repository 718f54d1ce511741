"""EAGLE-1 and EAGLE-2: the draft predicts the target's last hidden state, and the target's own head
reads it. They train the same weights; EAGLE-2 drafts a tree of the likeliest continuations.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import WITHOUT_NORMS, Method, TrainerInputs
from fledge.methods.eagle3.method import CHAIN, TREE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.decode.strategy import Strategy
    from fledge.formats.codec import Format
    from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
    from fledge.methods.section import LossSection
    from fledge.methods.shared.draft import DraftModel, Reading
    from fledge.methods.shared.objective import Objective


class Eagle1(Method):
    name = "eagle1"
    title = "EAGLE-1"
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
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry("strategy", CHAIN | TREE)
    formats: ClassVar[Mapping[str, "Format"]] = Registry(
        "engine",
        {
            "vllm": "fledge.formats.codec:EAGLE1_VLLM",
            "sglang": "fledge.formats.codec:EAGLE1_SGLANG",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "eagle", "sglang": "EAGLE"}

    @property
    def section(self) -> "type[LossSection]":
        from fledge.methods.eagle1.section import Eagle1Section

        return Eagle1Section

    def owns(self, config: "PretrainedConfig") -> bool:
        return getattr(config, "eagle_version", None) == self.config_version

    def draft_type(self) -> "type[LlamaEagle1DraftModel]":
        from fledge.methods.eagle1.draft import LlamaEagle1DraftModel

        return LlamaEagle1DraftModel

    def aux_layers(self, section: Any = None) -> int:
        return 1  # the state after the final norm

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        return self.bench_draft_settings(vocab_size)

    def grow(self, draft: "DraftModel", config: "PretrainedConfig") -> "DraftModel | None":
        if not isinstance(draft, self.draft_type()):
            return None
        draft.config.eagle_version = self.config_version  # the weights mean the same in both
        return draft

    def reading(self, draft: Any) -> "Reading":
        from fledge.methods.shared.draft import Reading, wide

        _, state_EE = draft.fc.weight.chunk(2, dim=1)  # the other half reads the token
        return Reading(state_EE, wide, feeds_back=True)

    def objective(self, draft: Any, given: TrainerInputs, **options: Any) -> "Objective[Any]":
        from fledge.methods.eagle1.objective import Eagle1TrainerModule

        return Eagle1TrainerModule(draft, **given.arguments(), **options)

    def bench_options(self, *, depths: int = 0, **_: Any) -> dict[str, Any]:
        return {"draft_tokens": depths or 5}

    def bench_draft_settings(self, vocab_size: int, section: Any = None) -> dict[str, Any]:
        return {"eagle_version": self.config_version, "num_aux_hidden_states": 1}


class Eagle2(Eagle1):
    name = "eagle2"
    title = "EAGLE-2"
    config_version = 2
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry("strategy", TREE | CHAIN)

    @property
    def section(self) -> "type[LossSection]":
        from fledge.methods.eagle1.section import Eagle2Section

        return Eagle2Section

    def sglang_flags(self, num_draft_tokens: int) -> list[str]:
        from fledge.decode.strategy import TreeShape

        tree, count = TreeShape(), "--speculative-num-draft-tokens"
        steps = ["--speculative-num-steps", str(num_draft_tokens)]
        return [*steps, "--speculative-eagle-topk", str(tree.width), count, str(tree.nodes + 1)]


EAGLE1, EAGLE2 = Eagle1(), Eagle2()
