"""DFlash: all tokens of a block in one pass of a few layers that attend to the target's features.

What block drafters share is here; `dspark.py` adds its heads.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import Method, TrainerInputs

if TYPE_CHECKING:
    from torch import Tensor

    from fledge.core.errors import BadInput
    from fledge.decode.strategies.base import Strategy
    from fledge.draft.base import DraftModel
    from fledge.draft.block import BlockDraftModel
    from fledge.draft.reading import Reading
    from fledge.export.layout import PlainDraft
    from fledge.export.rules import Feature
    from fledge.methods.block_section import BlockSection
    from fledge.objective.base import Objective
    from fledge.objective.work import Work


class BlockMethod(Method):
    draft_defaults: ClassVar[Mapping[str, Any]] = {"layers": 5, "draft_vocab_size": None}
    fixed_draft: ClassVar[Mapping[str, Any]] = {
        "head_from_target": True,
        "layers_from_target": False,
        "freeze_embeddings": True,
        "qk_norm": True,
        "fc_norm": False,
        "norm_output": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    carries_states = False
    usual_layers: ClassVar[int] = 5  # default number of aux layers
    bench_settings: ClassVar[Mapping[str, Any]] = {"block_size": 8}
    """Additional entries of a draft's config in `fledge bench train`."""

    def draft_type(self) -> "type[BlockDraftModel]":
        from fledge.draft.block import BlockDraftModel

        return BlockDraftModel

    def aux_layers(self, section: Any = None) -> int:
        return self.usual_layers if section is None else int(section.listened_layers)

    def default_layers(self, depth: int, count: int) -> list[int]:
        from fledge.target.layers import spread_layer_ids

        return spread_layer_ids(depth, count)

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        from fledge.draft.mask_token import check_mask_token_id, choose_mask_token_id

        if section.mask_token_id is None:
            mask_token_id = choose_mask_token_id(tokenizer, vocab_size)
        else:
            mask_token_id = check_mask_token_id(section.mask_token_id, tokenizer, vocab_size)
        return {**section.draft_settings(), "mask_token_id": mask_token_id}

    def grow(self, draft: "DraftModel", config: Any) -> "DraftModel | None":
        from fledge.draft.block import grown

        return grown(draft, config) if isinstance(draft, self.draft_type()) else None

    def reading(self, draft: Any) -> "Reading":
        from fledge.draft.reading import Reading, wide

        return Reading(draft.fc.weight, wide)

    def work(self, draft: Any, settings: Any) -> "Work":
        from fledge.objective.block import layout
        from fledge.objective.block_work import BlockWork
        from fledge.objective.work import Layouts
        from fledge.rollout.block_plan import ANCHOR_TOKENS

        drawn = layout(draft, settings)
        everywhere = partial(drawn, anchors=ANCHOR_TOKENS)
        return BlockWork(draft, Layouts(drawn, drawn, everywhere), settings.reads_target)

    def bench_options(self, **_: Any) -> dict[str, Any]:
        return {"anchors": 512, "gamma": 4.0}

    def bench_draft_settings(self, vocab_size: int, section: Any = None) -> dict[str, Any]:
        defaults = {"num_aux_hidden_states": self.usual_layers, **self.bench_settings}
        settings = defaults if section is None else section.draft_settings()
        return {**settings, "mask_token_id": vocab_size - 1}

    def sglang_flags(self, num_draft_tokens: int) -> list[str]:
        return ["--speculative-num-draft-tokens", str(num_draft_tokens + 1)]

    def export_facts(self, config: Any, target_layers: int | None) -> dict[str, Any]:
        from fledge.export.block_layout import block_facts

        return block_facts(config, target_layers)

    def export_features(self, config: Any) -> "dict[Feature, bool]":
        from fledge.export.block_layout import block_features

        return block_features(config)

    def refused_tokens(self, config: Any, asked: int) -> "BadInput | None":
        from fledge.export.block_layout import not_a_whole_block

        return not_a_whole_block(config, asked)

    def with_target_rows(self, draft: "PlainDraft", head_VE: "Tensor | None") -> "PlainDraft":
        from fledge.export.block_layout import with_head_rows

        return with_head_rows(draft, head_VE)


class Dflash(BlockMethod):
    name = "dflash"
    title = "DFlash"
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry(
        "strategy", {"block": "fledge.decode.strategies.block:Block"}
    )
    formats: ClassVar[Mapping[str, str]] = {
        "vllm": "dflash-flat",
        "sglang": "dflash-flat",
        "speculators": "speculators-dflash",
    }
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "dflash", "sglang": "DFLASH"}

    @property
    def section(self) -> "type[BlockSection]":
        from fledge.methods.dflash_section import DflashSection

        return DflashSection

    def owns(self, config: Any) -> bool:
        return getattr(config, "block_size", None) is not None

    def objective(self, draft: Any, given: TrainerInputs, **options: Any) -> "Objective[Any]":
        from fledge.objective.dflash import DFlashTrainerModule

        return DFlashTrainerModule(draft, **given.arguments(), **options)


DFLASH = Dflash()
