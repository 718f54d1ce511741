"""Depth-0 keys and values from the ranks that computed them (`rollout.context`).

The one exchange of context parallelism: forward every rank gets everybody's, backward every rank
gets the gradients that everybody has for its own. One collective each way, keys and values
together.
"""

from typing import Any

import torch
from torch import Tensor

from fledge.kernels.attention.blocked import KeysValues
from fledge.rollout.context import Gathering

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


def gathered(own: KeysValues, gathering: Gathering | None) -> KeysValues:
    """[O, G, C] each of this rank's slots -> [T, G, C] each of all; None: one rank has them all."""
    if gathering is None:
        return own
    both_T2GC: Tensor = _Gathered.apply(torch.cat(own, dim=1), gathering)  # type: ignore[no-untyped-call]
    keys_TGC, values_TGC = both_T2GC.chunk(2, dim=1)
    return keys_TGC, values_TGC


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_OX: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering, ctx.count = gathering, len(own_OX)
        longest, ranks = gathering.longest, gathering.ranks
        filled = own_OX.new_zeros(longest, *own_OX.shape[1:])
        filled[: len(own_OX)] = own_OX
        everybody = own_OX.new_empty(ranks.size * longest, *own_OX.shape[1:])
        all_gather_single(everybody, filled, group=ranks.group)
        return everybody.index_select(0, gathering.place_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dall_TX,) = grads
        gathering: Gathering = ctx.gathering
        longest, ranks = gathering.longest, gathering.ranks
        everybody = dall_TX.new_zeros(ranks.size * longest, *dall_TX.shape[1:])
        everybody.index_copy_(0, gathering.place_T, dall_TX)
        down = everybody.new_empty(longest, *dall_TX.shape[1:])
        reduce_scatter_single(down, everybody, group=ranks.group)
        return down[: ctx.count], None
