"""Block attention (DFlash, DSpark): the context before a block, plus the block itself.

The queries of block n see the keys of its document up to `slot`, which is everything strictly
before the block's first token, and the keys of their own block: all of them, or, if `causal`, those
up to their own. With a `window`, keys that are `window` or more places before the query are hidden.
Context tokens have no queries. Rotary positions are applied before attention.

`block_visible` is the rule as a dense matrix, `reference_blocks` the definition based on it. On a
CPU the context part is computed by `rollout.attention`; on a GPU its kernels compute both.

Shapes: N blocks of J queries, T key axis, R query heads that share a key head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fledge.methods.block.plan import BlockRows
from fledge.rollout.attention import (
    AttentionKind,
    KeysValues,
    dense_attention,
    kernel_runs,
    prefix_backward,
    prefix_forward,
)

if TYPE_CHECKING:
    from fledge.rollout.attention_triton import Job


@dataclass(frozen=True)
class Again:
    """How a backward pass recomputes the inputs of attention, from tensors that are kept anyway."""

    kept: tuple[Tensor, ...]
    make: Callable[..., tuple[Tensor, ...]]  # kept -> q, k and v of the context, k and v of blocks


@dataclass(frozen=True)
class Sight:
    """Which keys the queries of a layer see."""

    causal: bool = False  # inside the block
    window: int | None = None


def block_attention(
    q_NJHC: Tensor,
    context: KeysValues,  # [T, G, C] each
    own: KeysValues,  # [N, J, G, C] each
    rows: BlockRows,
    sight: Sight,
    *,
    kind: AttentionKind = "fast",
    again: Again | None = None,
) -> Tensor:
    """The attention output [N, J, H, C], in the dtype of q. With `again` the inputs are recomputed
    in the backward pass instead of kept."""
    if kind == "reference":
        return reference_blocks(q_NJHC, context, own, rows, sight)
    if kernel_runs(q_NJHC, *context, *own):
        return fused_blocks(q_NJHC, context, own, rows, sight, again)
    out: Tensor = _BlockAttention.apply(rows, sight, again, q_NJHC, *context, *own)  # type: ignore[no-untyped-call]
    return out


def block_visible(rows: BlockRows, num_keys: int, sight: Sight) -> tuple[Tensor, Tensor]:
    """Which context keys each query sees [N, J, T], and which keys of its own block [J, J]."""
    place_J = torch.arange(rows.size, device=rows.slot_N.device)
    key_T = torch.arange(num_keys, device=rows.slot_N.device)
    slot_N11, first_N11 = rows.slot_N[:, None, None], rows.first_N[:, None, None]
    context_NJT = ((key_T >= first_N11) & (key_T <= slot_N11)).repeat(1, rows.size, 1)
    own_JJ = torch.ones(rows.size, rows.size, dtype=torch.bool, device=key_T.device)
    back_JJ = place_J[:, None] - place_J
    if sight.causal:
        own_JJ &= back_JJ >= 0
    if sight.window is not None:
        back_NJT = slot_N11 + 1 + place_J[:, None] - key_T
        context_NJT &= back_NJT < sight.window
        own_JJ &= back_JJ < sight.window
    return context_NJT, own_JJ


def reference_blocks(
    q_NJHC: Tensor, context: KeysValues, own: KeysValues, rows: BlockRows, sight: Sight
) -> Tensor:
    """The definition, by `block_visible`."""
    context_NJT, own_JJ = block_visible(rows, len(context[0]), sight)
    each_NN = torch.eye(len(rows), device=own_JJ.device)
    own_QQ = torch.kron(each_NN, own_JJ.to(each_NN.dtype)).bool()
    visible = torch.cat([context_NJT.flatten(0, 1), own_QQ], dim=1)
    keys, values = (torch.cat([x, y.flatten(0, 1)]) for x, y in zip(context, own, strict=True))
    return dense_attention(q_NJHC.flatten(0, 1), keys, values, visible).view(q_NJHC.shape)


class _BlockAttention(torch.autograd.Function):
    """One softmax over both parts, differentiated separately as in `rollout.attention`."""

    @staticmethod
    def forward(
        ctx: Any, rows: BlockRows, sight: Sight, again: Again | None, *tensors: Tensor
    ) -> Tensor:
        q_NJHC, k_TGC, v_TGC, keys_NJGC, values_NJGC = tensors
        flat = q_NJHC.flatten(0, 1)
        out, lse = prefix_forward(flat, k_TGC, v_TGC, rows.flat(sight.window))
        out = torch.where(lse.isfinite()[..., None], out, 0.0)  # a window may hide all keys
        scores_NGRJJ = _own_scores(q_NJHC, keys_NJGC, rows, sight)
        before_NGRJ = _by_head(lse.view(q_NJHC.shape[:3]), keys_NJGC.shape[2])
        total_NGRJ = torch.logaddexp(before_NGRJ, scores_NGRJJ.logsumexp(-1))
        weights = (scores_NGRJJ - total_NGRJ[..., None]).exp()
        inside = torch.einsum("ngrji,nigc->njgrc", weights, values_NJGC.to(weights.dtype))
        fade = _from_head((before_NGRJ - total_NGRJ).exp())
        out_NJHC = out.view(q_NJHC.shape) * fade[..., None] + inside.flatten(2, 3)
        out_NJHC = out_NJHC.to(q_NJHC.dtype)
        ctx.rows, ctx.sight = rows, sight
        keep_inputs(ctx, again, tensors, out_NJHC, _from_head(total_NGRJ))
        return out_NJHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, out_NJHC, lse_NJH = kept_inputs(ctx)
        q_NJHC, k_TGC, v_TGC, keys_NJGC, values_NJGC = inputs
        (dout_NJHC,) = grads
        delta_NJH = (dout_NJHC.to(lse_NJH.dtype) * out_NJHC).sum(-1)
        flat = ctx.rows.flat(ctx.sight.window)
        q, dout, lse, delta = (x.flatten(0, 1) for x in (q_NJHC, dout_NJHC, lse_NJH, delta_NJH))
        dq, dk_TGC, dv_TGC = prefix_backward(q, k_TGC, v_TGC, dout, lse, delta, flat)
        groups, scale = keys_NJGC.shape[2], q_NJHC.shape[-1] ** -0.5
        scores = _own_scores(q_NJHC, keys_NJGC, ctx.rows, ctx.sight)
        weights = (scores - _by_head(lse_NJH, groups)[..., None]).exp()
        q, dout = (_grouped(x, groups).to(weights.dtype) for x in (q_NJHC, dout_NJHC))
        dweights = torch.einsum("njgrc,nigc->ngrji", dout, values_NJGC.to(weights.dtype))
        dscores = weights * (dweights - _by_head(delta_NJH, groups)[..., None]) * scale
        dq_own = torch.einsum("ngrji,nigc->njgrc", dscores, keys_NJGC.to(weights.dtype))
        dq = dq.view(q_NJHC.shape) + dq_own.flatten(2, 3)
        dkeys = torch.einsum("ngrji,njgrc->nigc", dscores, q)
        dvalues = torch.einsum("ngrji,njgrc->nigc", weights, dout)
        pairs = zip((dq, dk_TGC, dv_TGC, dkeys, dvalues), inputs, strict=True)
        return None, None, None, *(grad.to(x.dtype) for grad, x in pairs)


# --- on a GPU -------------------------------------------------------------------------------------


def fused_blocks(
    q_NJHC: Tensor,
    context: KeysValues,
    own: KeysValues,
    rows: BlockRows,
    sight: Sight,
    again: Again | None = None,
) -> Tensor:
    """The same on a GPU: queries, and the blocks' own keys, on one flat axis each."""
    out: Tensor = _FusedBlocks.apply(rows, sight, again, q_NJHC, *context, *own)  # type: ignore[no-untyped-call]
    return out


class _FusedBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: BlockRows, sight: Sight, again: Again | None, *tensors: Tensor
    ) -> Tensor:
        out_QHC, lse_QH = _jobs(rows, sight, *tensors)[0].attend()
        ctx.rows, ctx.sight = rows, sight
        keep_inputs(ctx, again, tensors, out_QHC, lse_QH)
        return out_QHC.view(tensors[0].shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, out_QHC, lse_QH = kept_inputs(ctx)
        both, inside = _jobs(ctx.rows, ctx.sight, *tensors)
        dout_QHC = grads[0].contiguous().flatten(0, 1)
        dq_QHC, delta_QH = both.query_grad(out_QHC, dout_QHC, lse_QH)
        context_grads = both.key_grad(dout_QHC, lse_QH, delta_QH)
        own_grads = inside.key_grad(dout_QHC, lse_QH, delta_QH)
        flat_grads = (dq_QHC, *context_grads, *own_grads)
        shaped = (grad.view(x.shape) for grad, x in zip(flat_grads, tensors, strict=True))
        return None, None, None, *shaped


def _jobs(rows: BlockRows, sight: Sight, *tensors: Tensor) -> "tuple[Job, Job]":
    """The attention of all queries, and their attention to the blocks' own keys alone."""
    from fledge.rollout.attention_triton import Chain, Job, Own

    q_NJHC, k_TGC, v_TGC, keys_NJGC, values_NJGC = tensors
    q_QHC, keys, values = (x.flatten(0, 1) for x in (q_NJHC, keys_NJGC, values_NJGC))
    inside = rows.inside(causal=sight.causal, window=sight.window)
    no_chain, context_rows = Chain([], []), rows.flat(sight.window)
    both = Job(q_QHC, k_TGC, v_TGC, context_rows, no_chain, Own(keys, values, inside))
    return both, Job(q_QHC, keys, values, inside, no_chain)


# --- what the backward pass keeps ----------------------------------------------------------------


def keep_inputs(
    ctx: Any, again: Again | None, inputs: tuple[Tensor, ...], *results: Tensor
) -> None:
    """Keep what the backward pass needs: the inputs, or the tensors to recompute them from."""
    ctx.make = None if again is None else again.make
    sources = inputs if again is None else tuple(x.detach() for x in again.kept)
    ctx.save_for_backward(*sources, *results)


def kept_inputs(ctx: Any) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """The inputs, recomputed if necessary, and the two results."""
    *sources, out, lse = ctx.saved_tensors
    if ctx.make is None:
        return tuple(sources), out, lse
    with torch.no_grad():
        return ctx.make(*sources), out, lse


def _grouped(x_NJHC: Tensor, groups: int) -> Tensor:
    """[N, J, G, R, C]"""
    blocks, size, heads, channels = x_NJHC.shape
    return x_NJHC.reshape(blocks, size, groups, heads // groups, channels)


def _by_head(x_NJH: Tensor, groups: int) -> Tensor:
    """[N, G, R, J]"""
    return _grouped(x_NJH[..., None], groups).squeeze(-1).permute(0, 2, 3, 1)


def _from_head(x_NGRJ: Tensor) -> Tensor:
    """[N, J, H]"""
    return x_NGRJ.permute(0, 3, 1, 2).flatten(2, 3)


def _own_scores(q_NJHC: Tensor, keys_NJGC: Tensor, rows: BlockRows, sight: Sight) -> Tensor:
    """[N, G, R, J, J], -inf where hidden."""
    wide = torch.promote_types(q_NJHC.dtype, torch.float32)
    q = _grouped(q_NJHC.to(wide), keys_NJGC.shape[2]) * q_NJHC.shape[-1] ** -0.5
    scores = torch.einsum("njgrc,nigc->ngrji", q, keys_NJGC.to(wide))
    _, own_JJ = block_visible(rows, 0, sight)
    return scores.masked_fill_(~own_JJ, float("-inf"))
