"""Rollout attention with all depths in one call, for P-EAGLE.

Visibility is as in `reference.py`: depth-0 keys up to the anchor, and the row's own rollout up to
its own depth. Queries are the flat axis Q of `parallel_plan.py`: depth-0 rows first, then the chain
rows, whose own keys and values are the chain. One pass computes the prefix of all rows; the chain
is added per depth, with the same arithmetic as EAGLE-3's chain. On a GPU one kernel does both
(`triton_parallel.py`).

`parallel_visible` is the rule as a dense matrix, `reference_parallel` the definition based on it.

Shapes: Q queries, of which the last M are chain rows; T key axis.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.attention.blocked import (
    KeysValues,
    chain_backward,
    kernel_runs,
    merge_chain,
    prefix_backward,
    prefix_forward,
)
from fledge.kernels.attention.reference import AttentionKind, prefix_visible
from fledge.rollout.plan import QueryRows


def parallel_attention(
    q_QHC: Tensor,
    prefix: KeysValues,  # depth-0 keys and values [T, G, C]
    chain: KeysValues,  # the chain rows' own [M, G, C]
    rows: QueryRows,
    counts: Sequence[int],  # chain rows at depths 1, 2, ...: nested, see `parallel_plan.py`
    *,
    starts_K: Tensor | None = None,  # first chain row of each depth; None: computed from counts
    kind: AttentionKind = "fast",
) -> Tensor:
    """The attention output [Q, H, C], in the dtype of q."""
    if kind == "reference":
        return reference_parallel(q_QHC, prefix, chain, rows, counts)
    if kernel_runs(q_QHC, *prefix, *chain):
        from fledge.kernels.attention.triton_parallel import fused_parallel

        return fused_parallel(q_QHC, prefix, chain, rows, counts, starts_K)
    out: Tensor = _ParallelAttention.apply(rows, tuple(counts), q_QHC, *prefix, *chain)  # type: ignore[no-untyped-call]
    return out


def parallel_visible(rows: QueryRows, counts: Sequence[int], num_keys: int) -> Tensor:
    """[Q, T + M]: which depth-0 slots and which chain rows each query sees."""
    device = rows.slot_N.device
    depth_M = torch.repeat_interleave(
        torch.arange(1, len(counts) + 1, device=device), torch.tensor(counts, device=device).long()
    )
    depth_Q = torch.cat([depth_M.new_zeros(len(rows) - len(depth_M)), depth_M])
    anchor_M = rows.slot_N[len(rows) - len(depth_M) :]
    own_chain = (rows.slot_N[:, None] == anchor_M) & (depth_M <= depth_Q[:, None])
    return torch.cat([prefix_visible(rows, num_keys), own_chain], dim=1)


def reference_parallel(
    q_QHC: Tensor, prefix: KeysValues, chain: KeysValues, rows: QueryRows, counts: Sequence[int]
) -> Tensor:
    """The definition: every query against every key, one softmax in fp32."""
    wide = torch.promote_types(q_QHC.dtype, torch.float32)
    keys, values = (
        torch.cat(pair).to(wide).repeat_interleave(q_QHC.shape[1] // prefix[0].shape[1], dim=1)
        for pair in zip(prefix, chain, strict=True)
    )
    scores = torch.einsum("qhc,uhc->qhu", q_QHC.to(wide), keys) * q_QHC.shape[-1] ** -0.5
    hidden = ~parallel_visible(rows, counts, len(prefix[0]))
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("qhu,uhc->qhc", weights, values).to(q_QHC.dtype)


def _own_chains(num_rows: int, counts: Sequence[int]) -> Iterator[tuple[slice, list[slice]]]:
    """For each depth d: its queries on the Q axis, and its rollouts' chain rows at depths 1..d.

    Rollouts are in the same order at every depth, so those that reach depth d come first at each
    shallower depth.
    """
    starts = [sum(counts[:depth]) for depth in range(len(counts))]
    first = num_rows - sum(counts)
    for depth, count in enumerate(counts):
        if count:
            begin = first + starts[depth]
            shallower = [slice(start, start + count) for start in starts[: depth + 1]]
            yield slice(begin, begin + count), shallower


class _ParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: QueryRows, counts: tuple[int, ...], *tensors: Tensor) -> Tensor:
        q_QHC, k_TGC, v_TGC, keys_MGC, values_MGC = tensors
        out_QHC, lse_QH = prefix_forward(q_QHC, k_TGC, v_TGC, rows)
        for part, own_chain in _own_chains(len(rows), counts):
            out_QHC[part], lse_QH[part] = merge_chain(
                out_QHC[part],
                lse_QH[part],
                q_QHC[part],
                [keys_MGC[depth] for depth in own_chain],
                [values_MGC[depth] for depth in own_chain],
            )
        out_QHC = out_QHC.to(q_QHC.dtype)
        ctx.rows, ctx.counts = rows, counts
        ctx.save_for_backward(*tensors, out_QHC, lse_QH)
        return out_QHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_QHC,) = grads
        q_QHC, k_TGC, v_TGC, keys_MGC, values_MGC, out_QHC, lse_QH = ctx.saved_tensors
        delta_QH = (dout_QHC.to(lse_QH.dtype) * out_QHC).sum(-1)
        dq_QHC, dk_TGC, dv_TGC = prefix_backward(
            q_QHC, k_TGC, v_TGC, dout_QHC, lse_QH, delta_QH, ctx.rows
        )
        dkeys_MGC = torch.zeros_like(keys_MGC, dtype=lse_QH.dtype)
        dvalues_MGC = torch.zeros_like(dkeys_MGC)
        for part, own_chain in _own_chains(len(ctx.rows), ctx.counts):
            row = (dout_QHC[part], lse_QH[part], delta_QH[part])
            for depth in own_chain:
                dq, dk, dv = chain_backward(q_QHC[part], keys_MGC[depth], values_MGC[depth], *row)
                dq_QHC[part] += dq
                dkeys_MGC[depth] += dk
                dvalues_MGC[depth] += dv
        wide = (dq_QHC, dk_TGC, dv_TGC, dkeys_MGC, dvalues_MGC)
        return (None, None, *(grad.to(q_QHC.dtype) for grad in wide))
