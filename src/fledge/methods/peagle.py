"""P-EAGLE: all tokens of a round in one pass, from a learned placeholder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from fledge.core.settings import Count, PositiveCount, PositiveShare, Share, Tagged
from fledge.methods.base import LossSection, Method, TrainerInputs
from fledge.methods.eagle3 import AUX_LAYERS, EAGLE3
from fledge.objective.losses.base import Loss
from fledge.objective.losses.kl import KLDivergence
from fledge.objective.losses.registry import LOSSES

if TYPE_CHECKING:
    from fledge.draft.base import DraftModel
    from fledge.objective.base import Objective


class PeagleSection(LossSection):
    """P-EAGLE: all depths in one parallel pass."""

    kind: Literal["peagle"] = "peagle"
    """Drafts all tokens at once; vLLM serves it, SGLang does not."""

    loss: Annotated[Loss, Tagged("kind", lambda: LOSSES, default="kl", bare=True)] = KLDivergence()
    """What a wrong distribution costs: a name, or a mapping of kind and parameters; see below."""

    num_depths: PositiveCount = 8
    """Depths trained: as many as tokens drafted in serving."""

    down_sample_ratio: PositiveShare = 0.7
    """Share of rollouts kept from each depth to the next."""

    down_sample_ratio_min: Share = 0.2
    """Floor of the share kept at a depth."""

    sequence_partitions: PositiveCount = 1
    """Cut the elements into this many parts, one after another: same gradient, less memory."""

    mask_token_id: Count | None = None
    """Token id of the placeholder; null: one that the tokenizer never emits is chosen."""

    max_anchors: PositiveCount | None = None
    """At most this many rollouts a pack; null: all."""

    balance_depths: bool = False
    """Give every depth the same weight instead of every element."""

    @model_validator(mode="after")
    def _floor_below_ratio(self) -> "PeagleSection":
        if self.down_sample_ratio_min > self.down_sample_ratio:
            raise ValueError("down_sample_ratio_min is above down_sample_ratio")
        return self

    @property
    def depths(self) -> int:
        return self.num_depths


class Peagle(Method[PeagleSection]):
    name = "peagle"
    title = "P-EAGLE"
    section = PeagleSection
    draft_defaults: ClassVar[Mapping[str, object]] = {"layers": 4, "freeze_embeddings": False}
    strategies = ("parallel", "chain", "tree")
    formats: ClassVar[Mapping[str, str]] = {
        "vllm": "plain-vllm",
        "sglang": "plain-sglang",
        "speculators": "speculators-peagle",
    }
    serving: ClassVar[Mapping[str, object]] = {"parallel_drafting": True}

    def owns(self, config: Any) -> bool:
        return bool(config.parallel_drafting)

    def draft_type(self) -> "type[DraftModel]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel

        return LlamaEagle3DraftModel  # one class: its config says what it has

    def aux_layers(self, section: Any) -> int:
        return AUX_LAYERS

    def default_aux_layer_ids(self, depth: int, count: int) -> list[int]:
        return EAGLE3.default_aux_layer_ids(depth, count)

    def draft_settings(
        self, section: PeagleSection, *, tokenizer: Any, vocab_size: int
    ) -> dict[str, Any]:
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
        self, section: PeagleSection, draft: "DraftModel", given: TrainerInputs
    ) -> "Objective[Any]":
        from fledge.draft.eagle3 import LlamaEagle3DraftModel
        from fledge.objective.peagle import PEagleTrainerModule

        assert isinstance(draft, LlamaEagle3DraftModel)
        return PEagleTrainerModule(
            draft,
            num_depths=section.num_depths,
            down_sample_ratio=section.down_sample_ratio,
            down_sample_ratio_min=section.down_sample_ratio_min,
            sequence_partitions=section.sequence_partitions,
            balance_depths=section.balance_depths,
            max_anchors=section.max_anchors,
            **given.with_loss(section.loss),
        )

    def bench_section(self, *, depths: int = 0, partitions: int = 1, **_: Any) -> PeagleSection:
        return PeagleSection(num_depths=depths or 8, sequence_partitions=partitions)


PEAGLE = Peagle()
