"""Causal attention of documents that stand end to end in one row, forward only.

What a target needs for packed rows: the rollout's causal prefix with every slot as a row and no
chain. A slot sees the keys from `first` up to itself; a sliding window is a later `first`. The
definition is `reference_attention` in `reference.py`.

The kernel is an operator of its own (`fledge::attend_documents`), so that compiled layers call it
as it is.
"""

import torch
from torch import Tensor

from fledge.rollout.plan import QueryRows


@torch.library.custom_op("fledge::attend_documents", mutates_args=())
def attend_documents(
    q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, first_N: Tensor, slot_N: Tensor
) -> Tensor:
    """[N, H, C]; scores are divided by the root of C, as everywhere. `slot_N` is 0 .. N - 1."""
    from fledge.kernels.attention.triton import Chain, Job

    rows = QueryRows(slot_N, first_N, slot_N)
    out_NHC, _ = Job(q_NHC, k_NGC, v_NGC, rows, Chain([], [])).attend()
    return out_NHC


@attend_documents.register_fake
def _(q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, first_N: Tensor, slot_N: Tensor) -> Tensor:
    return q_NHC.new_empty(q_NHC.shape)
