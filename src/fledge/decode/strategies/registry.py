"""Which strategy a draft is decoded with, of those that its method lists."""

import torch

from fledge.core.errors import BadInput, nearest
from fledge.decode.strategies.base import Strategy
from fledge.decode.strategies.rollouts import Rollouts
from fledge.decode.strategies.shape import DraftShape
from fledge.draft.base import DraftModel
from fledge.methods.registry import METHODS, method_of


def check_name(name: str) -> None:
    """Reject a name that no method has a strategy for."""
    known = {name for method in METHODS.values() for name in method.strategies}
    if name not in known:
        raise BadInput(f"no drafting method '{name}'", fix=nearest(name, sorted(known)))


def choose(draft: DraftModel, name: str | None = None) -> type[Strategy]:
    """The named strategy, if it fits the draft; None selects the one the draft was trained for."""
    method = method_of(draft.config)
    name, strategies = name or method.own_strategy, method.strategies
    check_name(name)
    if name not in strategies or not strategies[name].fits(draft):
        others = [other for other in strategies if other != name]
        raise BadInput(
            f"this draft was not trained for {name} drafting", fix=f"use {' or '.join(others)}"
        )
    return strategies[name]


def fitting(draft: DraftModel) -> list[str]:
    """The names of all strategies that a draft can be decoded with, its own first."""
    strategies = method_of(draft.config).strategies
    return [name for name, strategy in strategies.items() if strategy.fits(draft)]


def rollouts_of(
    draft: DraftModel,
    num_draft_tokens: int,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> Rollouts:
    """The teacher-forced counterpart of a draft's strategy; without a name, of one that can be
    replayed."""
    kind = choose(draft, name or method_of(draft.config).replayed_strategy)
    strategy = kind(draft, DraftShape(num_draft_tokens))
    if strategy.rollouts is None:
        raise BadInput(f"method: {strategy.name} drafting cannot be replayed", fix="decode live")
    return strategy.rollouts(draft, strategy.depth, dtype)
