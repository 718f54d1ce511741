"""Gather depth-0 keys and values from the ranks that computed them (`rollout.context`).

This is the only communication of context parallelism. In the forward pass every rank receives the
keys and values of all ranks; in the backward pass it receives the summed gradients of its own. Each
direction takes one collective, for keys and values together.
"""

from typing import Any

import torch
from torch import Tensor

from fledge.kernels.attention.blocked import KeysValues
from fledge.rollout.context import Gathering

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # the names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


def gathered(own: KeysValues, gathering: Gathering | None) -> KeysValues:
    """[O, G, C] keys and values of this rank's slots -> [T, G, C] of all slots. Without a
    `gathering`, one rank has all of them."""
    if gathering is None:
        return own
    gathered_T2GC: Tensor = _Gathered.apply(torch.cat(own, dim=1), gathering)  # type: ignore[no-untyped-call]
    keys_TGC, values_TGC = gathered_T2GC.chunk(2, dim=1)
    return keys_TGC, values_TGC


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_OX: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering, ctx.count = gathering, len(own_OX)
        longest, ranks = gathering.longest, gathering.ranks
        padded = own_OX.new_zeros(longest, *own_OX.shape[1:])
        padded[: len(own_OX)] = own_OX
        all_ranks = own_OX.new_empty(ranks.size * longest, *own_OX.shape[1:])
        all_gather_single(all_ranks, padded, group=ranks.group)
        return all_ranks.index_select(0, gathering.place_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dall_TX,) = grads
        gathering: Gathering = ctx.gathering
        longest, ranks = gathering.longest, gathering.ranks
        all_ranks = dall_TX.new_zeros(ranks.size * longest, *dall_TX.shape[1:])
        all_ranks.index_copy_(0, gathering.place_T, dall_TX)
        dpadded = all_ranks.new_empty(longest, *dall_TX.shape[1:])
        reduce_scatter_single(dpadded, all_ranks, group=ranks.group)
        return dpadded[: ctx.count], None
