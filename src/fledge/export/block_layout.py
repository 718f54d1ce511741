"""What an export needs of a block draft (DFlash, DSpark): facts, features, rows of the head.

Block methods pass it on (`methods.base`, the part on engines).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fledge.core.errors import BadInput
from fledge.export.layout import PlainDraft
from fledge.export.rules import Feature

_BLOCK_SETTINGS = (
    "block_size", "sample_from_anchor", "causal", "sliding_window", "sliding_layers",
    "markov_rank", "confidence_head", "confidence_threshold", "confidence_temperatures",
)  # fmt: skip


def block_facts(config: Any, target_layers: int | None) -> dict[str, Any]:
    """Values for keys that only block drafts have."""
    facts = {name: getattr(config, name, None) for name in _BLOCK_SETTINGS}
    sliding = set(config.sliding_layers)
    kinds = ("full_attention", "sliding_attention")
    facts["layer_types"] = [kinds[i in sliding] for i in range(config.num_hidden_layers)]
    facts["num_target_layers"] = target_layers
    return facts


def block_features(config: Any) -> dict[Feature, bool]:
    """Features of a block draft; q/k norms do not count, because it always has them."""
    return {
        "blocks": True,
        "causal blocks": config.causal,
        "sliding layers": bool(config.sliding_layers),
        "reduced head": config.draft_vocab_size < config.vocab_size,
        "confidence head": config.confidence_head,
        "q/k norms": False,
        "chosen aux layers": False,  # every layout writes them
    }


def not_a_whole_block(config: Any, asked: int) -> BadInput | None:
    """Blocks of another length than in training are refused: their slots attend to each other."""
    if asked == config.draft_tokens:
        return None
    return BadInput(
        f"its blocks are of {config.draft_tokens} drafted tokens, not {asked}",
        where="--num-draft-tokens",
        fix="leave it out, or train with another objective.block_size",
    )


def with_head_rows(draft: PlainDraft, head_VE: Tensor | None) -> PlainDraft:
    """Add its rows of the target's head to a block draft with a reduced vocabulary, as the files
    need them; one with the whole vocabulary is returned as it is."""
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
