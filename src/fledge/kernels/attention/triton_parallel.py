"""P-EAGLE's attention on a GPU: rows of all depths at once, in the kernels of `triton_queries.py`.

Same results as `parallel.reference_parallel`. Importing this file imports Triton.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from fledge.kernels.attention import triton_keys as key_kernels
from fledge.kernels.attention.blocked import KeysValues
from fledge.kernels.attention.triton import CHAIN_ROWS, Chain, Job, Nested
from fledge.rollout.plan import QueryRows


def fused_parallel(
    q_QHC: Tensor,
    prefix: KeysValues,
    chain: KeysValues,
    rows: QueryRows,
    counts: Sequence[int],
    starts_K: Tensor | None = None,  # required in recorded steps, which cannot copy from the host
) -> Tensor:
    """`parallel.parallel_attention` on a GPU."""
    present = [count for count in counts if count]
    if starts_K is None:
        starts = torch.tensor([0, *accumulate(counts)])
        # non-blocking is safe: a tensor this small is copied before the call returns
        starts_K = starts.to(q_QHC.device, non_blocking=True)
    nested = Nested(starts_K, len(present), max(present, default=0))
    out: Tensor = _FusedParallel.apply(rows, nested, q_QHC, *prefix, *chain)  # type: ignore[no-untyped-call]
    return out


class _FusedParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: QueryRows, nested: Nested, *tensors: Tensor) -> Tensor:
        q_QHC, k_TGC, v_TGC, *chain = tensors
        job = Job(q_QHC, k_TGC, v_TGC, rows, Chain.of(chain, nested))
        out_QHC, lse_QH = job.attend()
        ctx.rows, ctx.nested = rows, nested
        ctx.save_for_backward(job.q, job.k, job.v, *job.chain.tensors, out_QHC, lse_QH)
        return out_QHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_QHC, k_TGC, v_TGC, *chain, out_QHC, lse_QH = ctx.saved_tensors
        dout_QHC = grads[0].contiguous()
        job = Job(q_QHC, k_TGC, v_TGC, ctx.rows, Chain.of(chain, ctx.nested))
        dq_QHC, delta_QH = job.query_grad(out_QHC, dout_QHC, lse_QH)
        dk_TGC, dv_TGC = job.key_grad(dout_QHC, lse_QH, delta_QH)
        chain_grads = _chain_grad(job, ctx.nested, dout_QHC, lse_QH, delta_QH)
        return None, None, dq_QHC, dk_TGC, dv_TGC, *chain_grads


def _chain_grad(
    job: Job, nested: Nested, dout_QHC: Tensor, lse_QH: Tensor, delta_QH: Tensor
) -> tuple[Tensor, Tensor]:
    (keys_MGC,), (values_MGC,) = job.chain.keys, job.chain.values
    dkeys_MGC, dvalues_MGC = (keys_MGC.new_empty(keys_MGC.shape) for _ in range(2))
    if nested.longest:
        grid = (triton.cdiv(nested.longest, CHAIN_ROWS), job.groups, nested.depth)
        with job.device:
            key_kernels.nested_chain_grad[grid](
                job.q, keys_MGC, values_MGC, dout_QHC, lse_QH, delta_QH, dkeys_MGC, dvalues_MGC,
                nested.starts_K, *job.q.stride()[:2], *job.chain_strides,
                job.first_chain, nested.depth, BLOCK_R=CHAIN_ROWS, **job.shape(),
            )  # fmt: skip
    return dkeys_MGC, dvalues_MGC
