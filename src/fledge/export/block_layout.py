"""What of a block draft (DFlash, DSpark) its tables ask for: facts, features, the head's rows."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fledge.core.errors import BadInput
from fledge.export.rules import Feature

_OWN = (
    "block_size", "sample_from_anchor", "causal", "sliding_window", "sliding_layers",
    "markov_rank", "confidence_head", "confidence_threshold", "confidence_temperatures",
)  # fmt: skip


def is_block(config: Any) -> bool:
    return getattr(config, "block_size", None) is not None


def block_facts(config: Any, target_layers: int | None) -> dict[str, Any]:
    """Values for keys that only block drafts have."""
    facts = {name: getattr(config, name, None) for name in _OWN}
    sliding = set(config.sliding_layers)
    kinds = ("full_attention", "sliding_attention")
    facts["layer_types"] = [kinds[i in sliding] for i in range(config.num_hidden_layers)]
    facts["num_target_layers"] = target_layers
    return facts


def block_features(config: Any) -> dict[Feature, bool]:
    """What an engine must do besides; q/k norms are no feature of a draft that always has them."""
    return {
        "blocks": True,
        "causal blocks": config.causal,
        "sliding layers": bool(config.sliding_layers),
        "reduced head": config.draft_vocab_size < config.vocab_size,
        "confidence head": config.confidence_head,
        "q/k norms": False,
        "chosen aux layers": False,  # every layout says them, all alike
    }


def check_whole_block(config: Any, asked: int | None) -> None:
    """A block is drafted as long as it was trained: its slots see one another."""
    if asked is not None and is_block(config) and asked != config.draft_tokens:
        raise BadInput(
            f"its blocks are of {config.draft_tokens} drafted tokens, not {asked}",
            where="--num-draft-tokens",
            fix="leave it out, or train with another objective.block_size",
        )


def with_head_rows(draft: Any, head_VE: Tensor | None) -> Any:
    """A block draft of a reduced vocabulary with its rows of the target's head, as files need it;
    any other draft as it is."""
    config, tensors = draft.config, draft.tensors
    if not is_block(config) or config.draft_vocab_size == config.vocab_size:
        return draft
    if head_VE is None:
        raise BadInput(
            "a reduced draft vocabulary is exported with its rows of the target's head",
            fix="leave out --without-target",
        )
    rows_WE = head_VE[tensors["t2d"].nonzero()[:, 0]].to(draft.dtype)
    return replace(draft, tensors={**tensors, "lm_head.weight": rows_WE})
