"""Rollout attention: a causal prefix of depth-0 keys, plus the row's own chain.

A row at depth k with its anchor at slot t sees the depth-0 keys of its own document up to t, and
the keys of its own rollout at depths 1..k. `reference_attention` is the definition, short and
dense; `blocked.py` computes the same without a [rows, keys] matrix, as do the kernels behind
`triton.py` on a GPU. Rotary positions are applied before attention.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fledge.kernels.attention.blocked import KeysValues, blocked_attention, kernel_runs
from fledge.rollout.plan import QueryRows

AttentionKind = Literal["fast", "reference"]


def rollout_attention(
    q_NHC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    rows: QueryRows,
    *,
    chain: Sequence[KeysValues] = (),
    kind: AttentionKind = "fast",
) -> Tensor:
    """The attention output [N, H, C], in the dtype of q.

    `chain` holds (keys, values) [>= N, G, C] of depths 1..k; rows of depth k are the first N of
    every shallower depth (see `plan.py`), so the others are cut off here.
    """
    if kind == "fast" and kernel_runs(q_NHC, k_TGC, v_TGC, *(x for pair in chain for x in pair)):
        from fledge.kernels.attention.triton import fused_attention

        return fused_attention(q_NHC, k_TGC, v_TGC, rows, chain)
    count = len(rows)
    own_chain = [(keys[:count], values[:count]) for keys, values in chain]
    attend = reference_attention if kind == "reference" else blocked_attention
    return attend(q_NHC, k_TGC, v_TGC, rows, own_chain)


def prefix_visible(rows: QueryRows, num_keys: int) -> Tensor:
    """[N, T]: whether a key is in the row's document and not after its anchor."""
    key_T = torch.arange(num_keys, device=rows.slot_N.device)
    return (key_T >= rows.first_N[:, None]) & (key_T <= rows.slot_N[:, None])


def reference_attention(
    q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows, chain: Sequence[KeysValues]
) -> Tensor:
    """The definition: all scores side by side, one softmax in fp32."""
    heads_per_key = q_NHC.shape[1] // k_TGC.shape[1]
    wide = torch.promote_types(q_NHC.dtype, torch.float32)

    def per_query_head(x: Tensor) -> Tensor:
        return x.to(wide).repeat_interleave(heads_per_key, dim=1)

    q = q_NHC.to(wide) * q_NHC.shape[-1] ** -0.5
    prefix_NHT = torch.einsum("nhc,thc->nht", q, per_query_head(k_TGC))
    hidden_NHT = ~prefix_visible(rows, len(k_TGC))[:, None]
    scores = [prefix_NHT.masked_fill(hidden_NHT, float("-inf"))]
    scores += [(q * per_query_head(keys)).sum(-1, keepdim=True) for keys, _ in chain]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    out = torch.einsum("nht,thc->nhc", weights[..., : len(k_TGC)], per_query_head(v_TGC))
    for depth, (_, values) in enumerate(chain):
        out = out + weights[..., len(k_TGC) + depth, None] * per_query_head(values)
    return out.to(q_NHC.dtype)
