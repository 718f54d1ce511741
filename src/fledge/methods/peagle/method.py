"""P-EAGLE: all tokens of a round in one pass, from a learned placeholder.

Its draft is EAGLE-3's with a placeholder; everything else is inherited.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import TrainerInputs
from fledge.methods.eagle3.method import CHAIN, FORMATS, TREE, Eagle3

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.decode.strategy import Strategy
    from fledge.formats.codec import Format
    from fledge.methods.section import LossSection
    from fledge.methods.shared.draft import DraftModel, Reading
    from fledge.methods.shared.objective import Objective

PARALLEL = {"parallel": "fledge.methods.peagle.decoding:Parallel"}


class Peagle(Eagle3):
    name = "peagle"
    title = "P-EAGLE"
    draft_defaults: ClassVar[Mapping[str, Any]] = {"layers": 4, "freeze_embeddings": False}
    carries_states = False
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry(
        "strategy", PARALLEL | CHAIN | TREE
    )
    formats: ClassVar[Mapping[str, "Format"]] = Registry(
        "engine", FORMATS | {"speculators": "fledge.formats.codec:SPECULATORS_PEAGLE"}
    )
    vllm_settings: ClassVar[Mapping[str, object]] = {"parallel_drafting": True}

    @property
    def section(self) -> "type[LossSection]":
        from fledge.methods.peagle.section import PeagleSection

        return PeagleSection

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(config.parallel_drafting)

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        from fledge.methods.shared.derive import check_mask_token_id, choose_mask_token_id

        if section.mask_token_id is None:
            mask_token_id = choose_mask_token_id(tokenizer, vocab_size)
        else:
            mask_token_id = check_mask_token_id(section.mask_token_id, tokenizer, vocab_size)
        return {"parallel_drafting": True, "mask_token_id": mask_token_id}

    def grow(self, draft: "DraftModel", config: "PretrainedConfig") -> "DraftModel | None":
        from fledge.methods.peagle.draft import peagle_from_eagle3

        if not isinstance(draft, self.draft_type()):
            return None  # its weights have another meaning
        return peagle_from_eagle3(draft, config)

    def reading(self, draft: Any) -> "Reading":
        reading = super().reading(draft)
        placeholder_1X = draft.mask_hidden.view(1, -1)  # read as the target's states are
        if draft.spec.fc_norm:  # the norm keeps only the direction of its input
            return replace(reading, fixed_MX=reading.inputs(placeholder_1X))
        return replace(reading, own_MX=placeholder_1X)

    def objective(self, draft: Any, given: TrainerInputs, **options: Any) -> "Objective[Any]":
        from fledge.methods.peagle.objective import PEagleTrainerModule

        return PEagleTrainerModule(draft, **given.arguments(), **options)

    def bench_options(self, *, depths: int = 0, partitions: int = 1, **_: Any) -> dict[str, Any]:
        return {"num_depths": depths or 8, "sequence_partitions": partitions}

    def bench_draft_settings(self, vocab_size: int, section: Any = None) -> dict[str, Any]:
        return {"parallel_drafting": True, "mask_token_id": vocab_size - 1}

    def version(self, config: "PretrainedConfig") -> str:
        return self.title


PEAGLE = Peagle()
