"""Causal attention of documents packed end to end in one row, forward only.

Targets use it for packed rows. It is the causal prefix of rollout attention, with every slot as a
row and no chain. A slot sees the keys from `first` up to itself; a sliding window is a later
`first`. The definition is `reference_attention` in `reference.py`.

It is registered as a custom operator (`fledge::attend_documents`), which compiled layers call
without tracing into it.
"""

import torch
from torch import Tensor

from fledge.rollout.plan import QueryRows


@torch.library.custom_op("fledge::attend_documents", mutates_args=())
def attend_documents(
    q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, first_N: Tensor, slot_N: Tensor
) -> Tensor:
    """[N, H, C]; scores are divided by the square root of C, as usual. `slot_N` is 0 .. N - 1."""
    from fledge.kernels.attention.triton import Chain, Job

    rows = QueryRows(slot_N, first_N, slot_N)
    out_NHC, _ = Job(q_NHC, k_NGC, v_NGC, rows, Chain([], [])).attend()
    return out_NHC


@attend_documents.register_fake
def _(q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, first_N: Tensor, slot_N: Tensor) -> Tensor:
    return q_NHC.new_empty(q_NHC.shape)
