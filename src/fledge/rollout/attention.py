"""Rollout attention: a causal prefix of depth-0 keys, plus the row's own chain.

A row at depth k with its anchor at slot t sees the depth-0 keys of its own document up to t, and
the keys of its own rollout at depths 1..k. `reference_attention` is the definition, short and
dense; `blocked_attention` computes the same without a [rows, keys] matrix, as do the kernels of
`attention_triton.py` on a GPU. Rotary positions are applied before attention.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fledge.kernels.gate import SMALLEST_SHARED_MEMORY, shared_memory, triton_runs
from fledge.rollout.context import Gathering
from fledge.rollout.plan import QueryRows

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # the names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

AttentionKind = Literal["fast", "reference"]
KeysValues = tuple[Tensor, Tensor]  # [T, G, C] each, of one depth


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
        from fledge.rollout.attention_triton import fused_attention

        return fused_attention(q_NHC, k_TGC, v_TGC, rows, chain)
    count = len(rows)
    own_chain = [(keys[:count], values[:count]) for keys, values in chain]
    attend = reference_attention if kind == "reference" else blocked_attention
    return attend(q_NHC, k_TGC, v_TGC, rows, own_chain)


def prefix_visible(rows: QueryRows, num_keys: int) -> Tensor:
    """[N, T]: whether a key is in the row's document and not after its anchor."""
    key_T = torch.arange(num_keys, device=rows.slot_N.device)
    return (key_T >= rows.first_N[:, None]) & (key_T <= rows.slot_N[:, None])


def dense_attention(
    q_NHC: Tensor, keys_UGC: Tensor, values_UGC: Tensor, visible_NU: Tensor
) -> Tensor:
    """The definition of all attention here: every query against every key, one softmax in fp32."""
    wide = torch.promote_types(q_NHC.dtype, torch.float32)
    heads_per_key = q_NHC.shape[1] // keys_UGC.shape[1]
    keys, values = (x.to(wide).repeat_interleave(heads_per_key, 1) for x in (keys_UGC, values_UGC))
    scores = torch.einsum("nhc,uhc->nhu", q_NHC.to(wide), keys) * q_NHC.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible_NU[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("nhu,uhc->nhc", weights, values).to(q_NHC.dtype)


def reference_attention(
    q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows, chain: Sequence[KeysValues]
) -> Tensor:
    """The definition: a row sees its prefix, and one key of each depth of its chain."""
    own = torch.eye(len(rows), dtype=torch.bool, device=q_NHC.device)
    visible = torch.cat([prefix_visible(rows, len(k_TGC)), *[own] * len(chain)], dim=1)
    keys, values = zip((k_TGC, v_TGC), *chain, strict=True)
    return dense_attention(q_NHC, torch.cat(keys), torch.cat(values), visible)


# --- blocks of queries ----------------------------------------------------------------------------
# Rollout attention in memory linear in T: blocks of queries against only the keys they can see.
#
# One softmax runs over the prefix and the chain together, so its gradient needs only the row's
# total log-sum-exp and sum(out * grad_out): the prefix part and the chain part are differentiated
# separately with the same two numbers, and no [rows, keys] tensor outlives a block.

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Which queries have a chain, and where its keys are: (number of the tensor, its rows) by depth.
Chains = Sequence[tuple[slice, Sequence[tuple[int, slice]]]]


def blocked_attention(
    q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows, chain: Sequence[KeysValues]
) -> Tensor:
    everywhere = slice(None)
    chains = [(everywhere, [(depth, everywhere) for depth in range(len(chain))])] if chain else []
    return attend_chains(q_NHC, (k_TGC, v_TGC), chain, rows, chains)


def attend_chains(
    q_NHC: Tensor,
    prefix: KeysValues,
    tensors: Sequence[KeysValues],
    rows: QueryRows,
    chains: Chains,
) -> Tensor:
    """Attention to the prefix and to the chains, whose keys and values are parts of `tensors`."""
    flat = (*(keys for keys, _ in tensors), *(values for _, values in tensors))
    out: Tensor = _BlockedAttention.apply(rows, chains, q_NHC, *prefix, *flat)  # type: ignore[no-untyped-call]
    return out


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: QueryRows,
        chains: Chains,
        q_NHC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        out_NHC, lse_NH = prefix_forward(q_NHC, k_TGC, v_TGC, rows)
        all_keys, all_values = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        for part, places in chains:
            keys, values = ([x[i][at] for i, at in places] for x in (all_keys, all_values))
            merged = merge_chain(out_NHC[part], lse_NH[part], q_NHC[part], keys, values)
            if part == slice(None):
                out_NHC, lse_NH = merged
            else:
                out_NHC[part], lse_NH[part] = merged
        out_NHC = out_NHC.to(q_NHC.dtype)
        ctx.rows, ctx.chains = rows, chains
        ctx.save_for_backward(q_NHC, k_TGC, v_TGC, out_NHC, lse_NH, *tensors)
        return out_NHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_NHC,) = grads
        q_NHC, k_TGC, v_TGC, out_NHC, lse_NH, *tensors = ctx.saved_tensors
        delta_NH = (dout_NHC.to(lse_NH.dtype) * out_NHC).sum(-1)
        dq_NHC, dk_TGC, dv_TGC = prefix_backward(
            q_NHC, k_TGC, v_TGC, dout_NHC, lse_NH, delta_NH, ctx.rows
        )
        dtensors = [torch.zeros_like(x, dtype=lse_NH.dtype) for x in tensors]
        half = len(tensors) // 2
        for part, places in ctx.chains:
            row = (dout_NHC[part], lse_NH[part], delta_NH[part])
            for i, at in places:
                keys, values = tensors[i][at], tensors[half + i][at]
                dq, dk, dv = chain_backward(q_NHC[part], keys, values, *row)
                dq_NHC[part] += dq
                dtensors[i][at] += dk
                dtensors[half + i][at] += dv
        wide = (dq_NHC, dk_TGC, dv_TGC, *dtensors)
        return (None, None, *(grad.to(q_NHC.dtype) for grad in wide))


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of scores and sums: fp32, or wider if the input is."""
    return torch.promote_types(x.dtype, torch.float32)


def _grouped(x_NHC: Tensor, num_groups: int) -> Tensor:
    """[N, H, C] -> [N, G, R, C] with the R query heads that share a key head side by side."""
    rows, heads, channels = x_NHC.shape
    return x_NHC.reshape(rows, num_groups, heads // num_groups, channels)


def kernel_runs(q_NHC: Tensor, *keys_and_values: Tensor) -> bool:
    """Whether the GPU kernel supports these tensors; if not, that is logged once."""
    channels, memory = q_NHC.shape[-1], shared_memory(q_NHC.device)
    supported = (
        q_NHC.dtype in KERNEL_DTYPES
        and all(x.dtype == q_NHC.dtype for x in keys_and_values)
        and 16 <= channels <= 256
        and channels % 8 == 0
        and memory >= SMALLEST_SHARED_MEMORY
    )
    reason = f"{q_NHC.dtype}, heads of {channels}, {memory >> 10} KiB of shared memory"
    return triton_runs(q_NHC, what="rollout attention", unsupported=None if supported else reason)


# --- the causal prefix -------------------------------------------------------------------------


def _blocks(rows: QueryRows) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(row indices, key range, mask of hidden scores) of every block."""
    for block in rows.blocks:
        index = rows.order_N[block.row_start : block.row_end]
        key = torch.arange(block.key_start, block.key_end, device=index.device)
        hidden = (key < rows.first_N[index, None]) | (key > rows.slot_N[index, None])
        yield index, slice(block.key_start, block.key_end), hidden


def _by_group(x_NHC: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """The block's rows as [G, rows * R, C] in the wide dtype: one matrix per key head."""
    block = _grouped(x_NHC.index_select(0, index).to(_wide(x_NHC)), num_groups)
    return block.transpose(0, 1).flatten(1, 2)


def _from_group(x: Tensor, num_rows: int) -> Tensor:
    """[G, rows * R, C] -> [rows, H, C]."""
    groups, flat, channels = x.shape
    per_row = x.reshape(groups, num_rows, flat // num_rows, channels)
    return per_row.transpose(0, 1).flatten(1, 2)


def _block_scores(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """[G, rows * R, keys], -inf where hidden."""
    scores = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
    groups, flat, num_keys = scores.shape
    per_row = scores.view(groups, len(hidden), flat // len(hidden), num_keys)
    per_row.masked_fill_(hidden[:, None], float("-inf"))
    return scores


def _count_products(q_NHC: Tensor, rows: QueryRows, count: int) -> None:
    """For `fledge plan`, whose tensors have no memory: `count` products over the visible pairs, as
    the kernels compute them, without the masked scores of blocks."""
    assert rows.sorted_host is not None
    slot, first = rows.sorted_host
    pairs, width = int((slot - first + 1).sum()), q_NHC.shape[1] * q_NHC.shape[2]
    for _ in range(count):
        torch.mm(q_NHC.new_empty(1, 1).expand(1, pairs), q_NHC.new_empty(1, 1).expand(pairs, width))


def prefix_forward(
    q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows
) -> tuple[Tensor, Tensor]:
    """Attention over the prefix only: output [N, H, C] and log-sum-exp [N, H], both wide."""
    groups, wide = k_TGC.shape[1], _wide(q_NHC)
    k_GTC, v_GTC = k_TGC.to(wide).transpose(0, 1), v_TGC.to(wide).transpose(0, 1)
    out_NHC = q_NHC.new_empty(q_NHC.shape, dtype=wide)
    lse_NH = q_NHC.new_empty(q_NHC.shape[:2], dtype=wide)
    if q_NHC.is_meta:
        _count_products(q_NHC, rows, 2)
        return out_NHC, lse_NH
    for index, keys, hidden in _blocks(rows):
        scores = _block_scores(_by_group(q_NHC, index, groups), k_GTC[:, keys], hidden)
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        out = torch.bmm(scores.sub_(lse).exp_(), v_GTC[:, keys])
        out_NHC[index] = _from_group(out, len(index))
        lse_NH[index] = _from_group(lse, len(index)).squeeze(-1)
    return out_NHC, lse_NH


def prefix_backward(
    q_NHC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    dout_NHC: Tensor,
    lse_NH: Tensor,
    delta_NH: Tensor,
    rows: QueryRows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, wide. `lse_NH` is the log-sum-exp of prefix and chain together."""
    groups, wide = k_TGC.shape[1], _wide(q_NHC)
    k_GTC, v_GTC = k_TGC.to(wide).transpose(0, 1), v_TGC.to(wide).transpose(0, 1)
    dq_NHC = q_NHC.new_empty(q_NHC.shape, dtype=wide)
    dk_GTC, dv_GTC = torch.zeros_like(k_GTC), torch.zeros_like(v_GTC)
    if q_NHC.is_meta:
        _count_products(q_NHC, rows, 4)
        return dq_NHC, dk_GTC.transpose(0, 1), dv_GTC.transpose(0, 1)
    for index, keys, hidden in _blocks(rows):
        q, dout = _by_group(q_NHC, index, groups), _by_group(dout_NHC, index, groups)
        lse = _by_group(lse_NH[..., None], index, groups)
        delta = _by_group(delta_NH[..., None], index, groups)
        weights = _block_scores(q, k_GTC[:, keys], hidden).sub_(lse).exp_()
        dv_GTC[:, keys] += torch.bmm(weights.transpose(1, 2), dout)
        dweights = torch.bmm(dout, v_GTC[:, keys].transpose(1, 2))
        dscores = dweights.sub_(delta).mul_(weights).mul_(q.shape[-1] ** -0.5)
        dq_NHC[index] = _from_group(torch.bmm(dscores, k_GTC[:, keys]), len(index))
        dk_GTC[:, keys] += torch.bmm(dscores.transpose(1, 2), q)
    return dq_NHC, dk_GTC.transpose(0, 1), dv_GTC.transpose(0, 1)


# --- the row's own chain -----------------------------------------------------------------------


def _chain_scores(q_NHC: Tensor, keys_NGC: Tensor) -> Tensor:
    """[N, H]: the score of each query with the key of its own rollout at one depth."""
    q = _grouped(q_NHC.to(_wide(q_NHC)), keys_NGC.shape[1])
    scores_NGR = (q * keys_NGC.unsqueeze(2)).sum(-1)
    return scores_NGR.flatten(1, 2).mul_(q_NHC.shape[-1] ** -0.5)


def merge_chain(
    out_NHC: Tensor, lse_NH: Tensor, q_NHC: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Combine the chain's scores and values with the prefix's output; returns output and total
    log-sum-exp."""
    scores = [_chain_scores(q_NHC, keys_NGC) for keys_NGC in keys]
    total_NH = torch.logsumexp(torch.stack([lse_NH, *scores]), dim=0)
    out_NHC = out_NHC * (lse_NH - total_NH).exp()[..., None]
    out_NGRC = _grouped(out_NHC, values[0].shape[1])  # a view, updated in place
    for score_NH, values_NGC in zip(scores, values, strict=True):
        weight = _grouped((score_NH - total_NH).exp()[..., None], values_NGC.shape[1])
        out_NGRC.addcmul_(weight, values_NGC.unsqueeze(2).to(out_NGRC.dtype))
    return out_NHC, total_NH


def chain_backward(
    q_NHC: Tensor,
    keys_NGC: Tensor,
    values_NGC: Tensor,
    dout_NHC: Tensor,
    lse_NH: Tensor,
    delta_NH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = keys_NGC.shape[1]
    q = _grouped(q_NHC.to(lse_NH.dtype), groups)
    dout = _grouped(dout_NHC.to(lse_NH.dtype), groups)
    weight = _grouped((_chain_scores(q_NHC, keys_NGC) - lse_NH).exp()[..., None], groups)
    delta = _grouped(delta_NH[..., None], groups)
    dweight = (dout * values_NGC.unsqueeze(2)).sum(-1, keepdim=True)
    dscore = weight * (dweight - delta) * q_NHC.shape[-1] ** -0.5
    dq_NHC = (dscore * keys_NGC.unsqueeze(2)).flatten(1, 2)
    return dq_NHC, (dscore * q).sum(2), (weight * dout).sum(2)


# --- keys of several ranks ------------------------------------------------------------------------
# Gather depth-0 keys and values from the ranks that computed them (`rollout.context`).
#
# This is the only communication of context parallelism. In the forward pass every rank receives the
# keys and values of all ranks; in the backward pass it receives the summed gradients of its own.
# Each direction takes one collective, for keys and values together.


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


# --- documents ------------------------------------------------------------------------------------
# Causal attention of documents packed end to end in one row, forward only, for targets: the causal
# prefix of rollout attention, with every slot as a row and no chain. A slot sees the keys from
# `first` up to itself; a sliding window is a later `first`. It is a custom operator
# (`fledge::attend_documents`), which compiled layers call without tracing into it.


@torch.library.custom_op("fledge::attend_documents", mutates_args=())
def attend_documents(
    q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, first_N: Tensor, slot_N: Tensor
) -> Tensor:
    """[N, H, C]; scores are divided by the square root of C, as usual. `slot_N` is 0 .. N - 1."""
    from fledge.rollout.attention_triton import Chain, Job

    rows = QueryRows(slot_N, first_N, slot_N)
    out_NHC, _ = Job(q_NHC, k_NGC, v_NGC, rows, Chain([], [])).attend()
    return out_NHC


@attend_documents.register_fake
def _(q_NHC: Tensor, k_NGC: Tensor, v_NGC: Tensor, first_N: Tensor, slot_N: Tensor) -> Tensor:
    return q_NHC.new_empty(q_NHC.shape)
