"""P-EAGLE: all tokens of a round in one pass, from a learned placeholder.

Its draft is EAGLE-3's with a placeholder; everything else is inherited.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import stated
from fledge.methods.eagle3.method import CHAIN, FORMATS, TREE, Eagle3

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.methods.shared.draft import DraftModel, Reading

PARALLEL = {"parallel": "fledge.methods.peagle.decoding:Parallel"}


class Peagle(Eagle3):
    name = "peagle"
    title = "P-EAGLE"
    section_path = "fledge.methods.peagle.section:PeagleSection"
    objective_path = "fledge.methods.peagle.objective:PEagleTrainerModule"
    depths_key = "num_depths"
    draft_defaults: ClassVar[Mapping[str, Any]] = {"layers": 4, "freeze_embeddings": False}
    carries_states = False
    strategies = Registry("strategy", PARALLEL | CHAIN | TREE)
    formats = Registry(
        "engine", FORMATS | {"speculators": "fledge.formats.codec:SPECULATORS_PEAGLE"}
    )
    vllm_settings: ClassVar[Mapping[str, object]] = {"parallel_drafting": True}

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(stated(config, "parallel_drafting"))

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        from fledge.methods.shared.placeholder import placeholder

        asked = None if section is None else section.placeholder
        return {"parallel_drafting": True, **placeholder(asked, tokenizer, vocab_size)}

    def grow(self, draft: Any, config: "PretrainedConfig") -> "DraftModel | None":
        from fledge.methods.peagle.draft import peagle_from_eagle3

        eagle3_drafts: Any = self.draft_type()
        if not isinstance(draft, eagle3_drafts):
            return None  # its weights have another meaning
        return peagle_from_eagle3(draft, config)

    def reading(self, draft: Any) -> "Reading | None":
        reading = super().reading(draft)
        if reading is None or draft.spec.norms_inputs:  # which keeps the placeholder's direction
            return None
        # the placeholder is read as the target's states are
        return replace(reading, own_MX=draft.mask_hidden.view(1, -1))

    def bench_options(self, *, depths: int = 0, **_: Any) -> dict[str, Any]:
        return {"num_depths": depths or 8}

    def version(self, config: "PretrainedConfig") -> str:
        return self.title


PEAGLE = Peagle()
