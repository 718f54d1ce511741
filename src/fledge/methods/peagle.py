"""P-EAGLE: all tokens of a round in one pass, from a learned placeholder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.methods.base import Method, TrainerInputs
from fledge.methods.eagle3 import AUX_LAYERS, EAGLE3

if TYPE_CHECKING:
    from fledge.draft.base import DraftModel
    from fledge.methods.peagle_section import PeagleSection
    from fledge.objective.base import Objective


class Peagle(Method):
    name = "peagle"
    title = "P-EAGLE"
    draft_defaults: ClassVar[Mapping[str, Any]] = {"layers": 4, "freeze_embeddings": False}
    carries_states = False
    strategies = ("parallel", "chain", "tree")
    formats: ClassVar[Mapping[str, str]] = {
        "vllm": "plain-vllm",
        "sglang": "plain-sglang",
        "speculators": "speculators-peagle",
    }
    algorithms = EAGLE3.algorithms
    vllm_settings: ClassVar[Mapping[str, object]] = {"parallel_drafting": True}

    @property
    def section(self) -> "type[PeagleSection]":
        from fledge.methods.peagle_section import PeagleSection

        return PeagleSection

    def owns(self, config: Any) -> bool:
        return bool(config.parallel_drafting)

    def draft_type(self) -> "type[DraftModel]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel

        return LlamaEagle3DraftModel  # one class: its config says what it has

    def aux_layers(self, section: Any = None) -> int:
        return AUX_LAYERS

    def default_aux_layer_ids(self, depth: int, count: int) -> list[int]:
        return EAGLE3.default_aux_layer_ids(depth, count)

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        from fledge.draft.mask_token import check_mask_token_id, choose_mask_token_id

        if section.mask_token_id is None:
            mask_token_id = choose_mask_token_id(tokenizer, vocab_size)
        else:
            mask_token_id = check_mask_token_id(section.mask_token_id, tokenizer, vocab_size)
        return {"parallel_drafting": True, "mask_token_id": mask_token_id}

    def grow(self, draft: "DraftModel", config: Any) -> "DraftModel | None":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel
        from fledge.draft.warm_start import peagle_from_eagle3

        if not isinstance(draft, LlamaEagle3DraftModel):
            return None  # nothing of it means the same here
        return peagle_from_eagle3(draft, config)

    def objective(
        self, draft: "DraftModel", given: TrainerInputs, **options: Any
    ) -> "Objective[Any]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel
        from fledge.objective.peagle import PEagleTrainerModule

        assert isinstance(draft, LlamaEagle3DraftModel)
        return PEagleTrainerModule(draft, **given.arguments(), **options)

    def bench_options(self, *, depths: int = 0, partitions: int = 1, **_: Any) -> dict[str, Any]:
        return {"num_depths": depths or 8, "sequence_partitions": partitions}

    def bench_draft_settings(self, vocab_size: int) -> dict[str, Any]:
        return {"parallel_drafting": True, "mask_token_id": vocab_size - 1}


PEAGLE = Peagle()
