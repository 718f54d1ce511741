"""How a draft reads the target: one linear map, which can be refitted to the states of another
target (`train/retarget/retarget.py`). Each method returns that of its drafts (`Method.reading`).

Shapes: X inputs of the map, M inputs that are the draft's own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """`weight_EX` and `own_MX` are the draft's own tensors: writing to them changes the draft."""

    weight_EX: Tensor
    inputs: Callable[[Tensor], Tensor]  # [..., A * D] states of the target -> [..., X]
    feeds_back: bool = False  # at deeper depths it also reads the draft's own states
    # inputs that do not come from a target, and whose outputs must not change (placeholders)
    own_MX: Tensor | None = None  # these can be refitted together with the weights
    fixed_MX: Tensor | None = None  # these cannot: the weights have to preserve their outputs


def wide(states: Tensor) -> Tensor:
    """The states in float32 or wider: those of many tokens are summed."""
    return states.to(torch.promote_types(states.dtype, torch.float32))
