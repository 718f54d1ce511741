"""Whether two ways of running a model give the same states: the model is asked, not its class."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fledge.target.capture import AuxBuffer
from fledge.target.hf.one_row import Unsupported

Way = Callable[[Tensor, AuxBuffer], None]  # runs ids [B, T] and fills the buffer
# What architectures raise that cannot run one of them (TypeError: a forward that takes no more
# arguments).
_REFUSALS = (Unsupported, TypeError, ValueError, RuntimeError, LookupError, AttributeError)


def fill_alike(one: Way, other: Way, aux_layer_ids: Sequence[int], device: torch.device) -> bool:
    """Whether both run twelve tokens, with the same aux states up to rounding."""
    ids_BT = torch.arange(12, device=device)[None]
    answers = []
    try:
        for way in (one, other):
            aux = AuxBuffer(ids_BT.shape, aux_layer_ids)
            way(ids_BT, aux)
            answers.append(aux.result().double())
    except _REFUSALS:
        return False
    error = (answers[0] - answers[1]).abs().mean() / answers[0].abs().mean()
    return bool(error < (1e-4 if aux.result().dtype in (torch.float32, torch.float64) else 3e-2))
