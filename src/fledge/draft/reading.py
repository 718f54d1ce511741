"""How a draft reads the target: one linear map, which a refit can move to another target's states
(`train/retarget/retarget.py`). Each method says what it is in its drafts (`Method.reading`).

Shapes: X inputs of the map, M inputs of the draft's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """Weights and own inputs are the draft's memory: what is written there, it computes with."""

    weight_EX: Tensor
    inputs: Callable[[Tensor], Tensor]  # [..., A * D] states of the target -> [..., X]
    feeds_back: bool = False  # deeper in a round it reads the draft's own states as well
    # inputs that are no target's, and are to be read as before (placeholders)
    own_MX: Tensor | None = None  # which can move along with the weights
    fixed_MX: Tensor | None = None  # which cannot: the weights have to leave them alone


def wide(states: Tensor) -> Tensor:
    """At least in float32: the states of many tokens are summed."""
    return states.to(torch.promote_types(states.dtype, torch.float32))
