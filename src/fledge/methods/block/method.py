"""Block drafts: a block of tokens in one pass of a few layers that attend to the target, and small
heads that make its tokens depend on each other."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import Method, stated
from fledge.methods.shared.config import WITHOUT_NORMS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from fledge.core.errors import BadInput
    from fledge.formats.codec import Feature, PlainDraft
    from fledge.methods.block.formats import BlockView
    from fledge.methods.shared.draft import DraftModel, Reading


_VLLM_CANDIDATES = (None, 1, 2, 4, 8, 16)


class BlockMethod(Method):
    draft_defaults: ClassVar[Mapping[str, Any]] = {"layers": 5, "draft_vocab_size": None}
    fixed_draft: ClassVar[Mapping[str, Any]] = {
        "head_from_target": True,
        "layers_from_target": False,
        "freeze_embeddings": True,
        "qk_norm": True,
        **WITHOUT_NORMS,
    }
    carries_states = False
    draft_path = "fledge.methods.block.draft:BlockDraftModel"
    usual_layers: ClassVar[int] = 5  # default number of aux layers
    bench_draft: ClassVar[Mapping[str, Any]] = {"num_aux_hidden_states": 5, "block_size": 8}
    """Keys of the drafts that `fledge bench train` measures."""

    def aux_layers(self, section: Any = None) -> int:
        return self.usual_layers if section is None else int(section.listened_layers)

    def default_layers(self, depth: int, count: int) -> list[int]:
        from fledge.target.layers import spread_layer_ids

        return spread_layer_ids(depth, count)

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        from fledge.methods.shared.placeholder import placeholder

        settings = self.bench_draft if section is None else section.draft_settings()
        asked = None if section is None else section.placeholder
        return {**settings, **placeholder(asked, tokenizer, vocab_size)}

    def grow(self, draft: Any, config: "PretrainedConfig") -> "DraftModel | None":
        from fledge.methods.block.draft import grown

        block_drafts: Any = self.draft_type()
        return grown(draft, config) if isinstance(draft, block_drafts) else None

    def reading(self, draft: Any) -> "Reading":
        from fledge.methods.shared.draft import Reading, wide

        return Reading(draft.fc.weight, wide)

    def bench_options(self, **_: Any) -> dict[str, Any]:
        return {"anchors": 512, "gamma": 4.0}

    def sglang_flags(self, num_draft_tokens: int) -> list[str]:
        return ["--speculative-num-draft-tokens", str(num_draft_tokens + 1)]

    def foreign(self) -> "type[BlockView]":
        from fledge.methods.block.formats import BlockView

        return BlockView

    def export_features(self, config: "PretrainedConfig") -> "dict[Feature, bool]":
        from fledge.methods.shared.rotary import rope_parameters

        return {
            "blocks": True,
            "causal blocks": config.causal,
            "sliding layers": bool(config.sliding_layers),
            "refined blocks": stated(config, "token_head") == "xpress",
            # vLLM's kernels take powers of two up to 16
            "large or odd candidate sets": (stated(config, "candidates") or 16)
            not in (1, 2, 4, 8, 16),
            # engines' codebooks and candidates are those of the whole vocabulary
            "reduced candidates": bool(stated(config, "candidate_head"))
            and config.draft_vocab_size < config.vocab_size,
            "reduced head": config.draft_vocab_size < config.vocab_size,
            "confidence head": config.confidence_head,
            "several layers": False,  # it usually has them
            "not three aux layers": False,
            "llama3 rotary of blocks": rope_parameters(config)["rope_type"] == "llama3",
            "q/k norms": False,  # it always has them
            "chosen aux layers": False,  # every layout writes them
        }

    def refused_tokens(self, config: "PretrainedConfig", asked: int) -> "BadInput | None":
        """Blocks of another length than in training: their slots attend to each other."""
        from fledge.core.errors import BadInput

        if asked == config.draft_tokens:
            return None
        return BadInput(
            f"its blocks are of {config.draft_tokens} drafted tokens, not {asked}",
            where="--num-draft-tokens",
            fix="leave it out, or train with another objective.block_size",
        )

    def with_target_rows(self, draft: "PlainDraft", head_VE: "Tensor | None") -> "PlainDraft":
        """With a reduced vocabulary the files have the draft's rows of the target's head."""
        from fledge.core.errors import BadInput

        config, tensors = draft.config, draft.tensors
        if config.draft_vocab_size == config.vocab_size:
            return draft
        if head_VE is None:
            raise BadInput(
                "a reduced draft vocabulary is exported with its rows of the target's head",
                fix="leave out --without-target",
            )
        rows_WE = head_VE[tensors["t2d"].nonzero()[:, 0]].to(draft.dtype)
        return replace(draft, tensors={**tensors, "lm_head.weight": rows_WE})


class Dflash(BlockMethod):
    name = "dflash"
    title = "DFlash"
    section_path = "fledge.methods.block.section:DflashSection"
    objective_path = "fledge.methods.block.objective:DFlashTrainerModule"
    strategies = Registry(
        "strategy",
        {
            "block": "fledge.methods.block.decoding:Block",
            "tree": "fledge.methods.block.decoding:BlockTree",
        },
    )
    formats = Registry(
        "engine",
        {
            "vllm": "fledge.methods.block.formats:DFLASH_FLAT",
            "sglang": "fledge.methods.block.formats:DFLASH_FLAT",
            "speculators": "fledge.methods.block.formats:SPECULATORS_DFLASH",
            "llama.cpp": "fledge.methods.block.formats:DFLASH_GGUF",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {
        "vllm": "dflash", "sglang": "DFLASH", "llama.cpp": "draft-dflash",
    }  # fmt: skip

    def owns(self, config: "PretrainedConfig") -> bool:
        return stated(config, "block_size") is not None


class Dspark(BlockMethod):
    """DFlash's block with two small heads. A Markov head conditions each token on the one before
    it; a confidence head predicts how likely it is to be accepted."""

    name = "dspark"
    title = "DSpark"
    section_path = "fledge.methods.block.section:DsparkSection"
    objective_path = "fledge.methods.block.objective:DSparkTrainerModule"
    bench_draft: ClassVar[Mapping[str, Any]] = {
        **BlockMethod.bench_draft,
        "sample_from_anchor": True,
        "markov_rank": 256,
        "confidence_head": True,
    }
    strategies = Registry(
        "strategy",
        {
            "markov": "fledge.methods.block.decoding:StepBlock",
            "tree": "fledge.methods.block.decoding:BlockTree",
        },
    )
    formats = Registry(
        "engine",
        {
            "vllm": "fledge.methods.block.formats:DSPARK_FLAT",
            "sglang": "fledge.methods.block.formats:DSPARK_FLAT",
            "speculators": "fledge.methods.block.formats:SPECULATORS_DSPARK",
            "llama.cpp": "fledge.methods.block.formats:DSPARK_GGUF",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {
        "vllm": "dspark", "sglang": "DSPARK", "llama.cpp": "draft-dspark",
    }  # fmt: skip

    def owns(self, config: "PretrainedConfig") -> bool:
        return DFLASH.owns(config) and bool(stated(config, "markov_rank"))


class Domino(BlockMethod):
    """DFlash's block, left to right: a GRU over the tokens so far corrects the logits."""

    name = "domino"
    title = "Domino"
    section_path = "fledge.methods.block.section:DominoSection"
    objective_path = "fledge.methods.block.heads.domino:DominoTrainerModule"
    bench_draft: ClassVar[Mapping[str, Any]] = {
        **BlockMethod.bench_draft,
        "sample_from_anchor": True,
        "token_head": "domino",
        "markov_rank": 256,
    }
    strategies = Registry(
        "strategy",
        {
            "domino": "fledge.methods.block.decoding:StepBlock",
            "tree": "fledge.methods.block.decoding:BlockTree",
        },
    )
    formats = Registry("engine", {"sglang": "fledge.methods.block.formats:DOMINO_FLAT"})
    algorithms: ClassVar[Mapping[str, str]] = {"sglang": "DFLASH"}

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(stated(config, "token_head") == self.name)


class Xpress(BlockMethod):
    """DFlash's block, refined by a few parallel passes of a small head."""

    name = "xpress"
    title = "XPress"
    section_path = "fledge.methods.block.section:XpressSection"
    objective_path = "fledge.methods.block.heads.xpress:XPressTrainerModule"
    bench_draft: ClassVar[Mapping[str, Any]] = {
        **BlockMethod.bench_draft,
        "token_head": "xpress",
        "markov_rank": 256,
    }
    strategies = Registry(
        "strategy",
        {
            "passes": "fledge.methods.block.heads.xpress:Passes",
            "tree": "fledge.methods.block.heads.xpress:PassTree",
        },
    )
    formats = Registry(
        "engine",
        {
            "vllm": "fledge.methods.block.formats:XPRESS_FLAT",
            "speculators": "fledge.methods.block.formats:SPECULATORS_XPRESS",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "dflash"}

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(stated(config, "token_head") == self.name)


_CONVOLVED = {**BlockMethod.bench_draft, "conv_kernel_size": 2}
_WALK = {
    "walk": "fledge.methods.block.heads.candidates:Walk",
    "tree": "fledge.methods.block.decoding:BlockTree",
}


class Dflash2(BlockMethod):
    """DFlash with convolutions inside the block, and a selector among the best tokens."""

    name = "dflash2"
    title = "DFlash 2"
    section_path = "fledge.methods.block.section:Dflash2Section"
    objective_path = "fledge.methods.block.heads.selector:DFlash2TrainerModule"
    bench_draft: ClassVar[Mapping[str, Any]] = {**_CONVOLVED, "candidate_head": "selector"}
    strategies = Registry("strategy", _WALK)
    formats = Registry(
        "engine",
        {
            "vllm": "fledge.methods.block.formats:DFLASH2_FLAT",
            "sglang": "fledge.methods.block.formats:DFLASH2_FLAT",
            "speculators": "fledge.methods.block.formats:SPECULATORS_DFLASH2",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "dflash", "sglang": "DFLASH"}

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(stated(config, "candidate_head") == "selector")


class Lilicorr(BlockMethod):
    """DFlash with a small transformer over the best tokens of all slots."""

    name = "lilicorr"
    title = "LiLiCorr"
    section_path = "fledge.methods.block.section:LilicorrSection"
    objective_path = "fledge.methods.block.heads.lilicorr:LiliCorrTrainerModule"
    bench_draft: ClassVar[Mapping[str, Any]] = {
        **_CONVOLVED,
        "candidate_head": "lilicorr",
        "lilicorr_hidden_size": 1024,
    }
    strategies = Registry("strategy", _WALK)
    formats = Registry(
        "engine",
        {
            "vllm": "fledge.methods.block.formats:LILICORR_FLAT",
            "sglang": "fledge.methods.block.formats:LILICORR_FLAT",
        },
    )
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "dflash", "sglang": "DFLASH"}

    def owns(self, config: "PretrainedConfig") -> bool:
        return bool(stated(config, "candidate_head") == self.name)


DFLASH, DSPARK, DOMINO, XPRESS = Dflash(), Dspark(), Domino(), Xpress()
DFLASH2, LILICORR = Dflash2(), Lilicorr()
