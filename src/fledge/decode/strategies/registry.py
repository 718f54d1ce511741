"""All strategies by name, and which of them a draft can be decoded with: its method says."""

import torch

from fledge.core.errors import BadInput, nearest
from fledge.core.registry import Registry
from fledge.decode.strategies.base import Strategy
from fledge.decode.strategies.rollouts import Rollouts
from fledge.decode.strategies.shape import DraftShape
from fledge.draft.base import DraftModel
from fledge.methods.base import Method
from fledge.methods.registry import method_of

STRATEGIES: Registry[type[Strategy]] = Registry(
    "drafting method",
    {
        "chain": "fledge.decode.strategies.chain:Chain",
        "parallel": "fledge.decode.strategies.parallel:Parallel",
        "tree": "fledge.decode.strategies.tree:Tree",
    },
)


def own_strategy(method: Method) -> type[Strategy]:
    """The way of drafting that a method trains for."""
    return STRATEGIES[method.strategies[0]]


def choose(draft: DraftModel, name: str | None = None) -> type[Strategy]:
    """The strategy that was asked for, if the draft has it; None: what it was trained for."""
    names = method_of(draft.config).strategies
    name = names[0] if name is None else name
    if name not in STRATEGIES:
        raise BadInput(f"no drafting method '{name}'", fix=nearest(name, list(STRATEGIES)))
    if name not in names or not STRATEGIES[name].fits(draft):
        others = [other for other in names if other != name]
        raise BadInput(
            f"this draft was not trained for {name} drafting", fix=f"use {' or '.join(others)}"
        )
    return STRATEGIES[name]


def rollouts_of(
    draft: DraftModel,
    num_draft_tokens: int,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> Rollouts:
    """The teacher-forced twin of a draft's strategy."""
    strategy = choose(draft, name)(draft, DraftShape(num_draft_tokens))
    if strategy.rollouts is None:
        raise BadInput(f"method: {strategy.name} drafting cannot be replayed", fix="decode live")
    return strategy.rollouts(draft, strategy.depth, dtype)
