# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Block attention on a GPU: the context's keys and the block's own in one running softmax.

Same results as `reference_blocks`. A *tile* is BLOCK_M consecutive (query, head) pairs of one
key head: pair m is query m // GROUP of the flat axis of all blocks' queries, head m % GROUP. Blocks
are sorted by where they start, so a tile's context is one interval of keys, shared by all queries
of its blocks, and its blocks' own keys are one interval of the flat axis. Both parts are products
of whole tiles; the second is mostly masked, but a tile has only a few blocks.

    attend        forward
    query_grad    dq, and delta = sum(out * dout) for the kernels below
    own_grad      dk, dv of the blocks' own keys

dk, dv of the context are computed by `attention_kernels.key_grad`, with every query as a row. The
kernels use no atomics, so results are reproducible bit for bit. Importing this file imports Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import GRANULE
from fledge.methods.block.attention import Again, Sight, keep_inputs, kept_inputs
from fledge.methods.block.plan import BlockRows
from fledge.rollout.attention import KeysValues
from fledge.rollout.attention_kernels import (
    LN2,
    LOG2E,
    NOTHING_YET,
    _attend_keys,
    _query_grad_keys,
    key_grad,
    load_rows,
    store_rows,
)
from fledge.rollout.attention_triton import Chain, Job

CHANGING = ["slot", "first", "num_queries"]  # arguments that change from batch to batch


@triton.jit
def _tile_of_blocks(
    slot, first, tile, num_queries,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile's blocks [low, high], and (begin, full, end): the tile sees context keys
    [begin, end), and all of its queries see [begin, full)."""
    low = tile * BLOCK_M // (GROUP * SIZE)
    high = (tl.minimum((tile + 1) * BLOCK_M, num_queries * GROUP) - 1) // (GROUP * SIZE)
    begin = tl.load(first + low).to(tl.int32)
    end = tl.load(slot + high).to(tl.int32) + 1
    lowest = tl.load(slot + low).to(tl.int32)
    common = lowest + 1 - begin
    one_document = tl.load(first + high).to(tl.int32) == begin
    full = begin + tl.where(one_document, common // BLOCK_N * BLOCK_N, 0)
    if WINDOW > 0:  # the first query of a block sees furthest back
        begin = tl.maximum(begin, lowest + 2 - WINDOW)
        full = begin
    return low, high, begin, full, end


@triton.jit
def _queries(slot, first, m, live, SIZE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr):
    """For each pair: its query on the flat axis, and the first and last context key it sees."""
    query = (m // GROUP).to(tl.int64)
    block = query // SIZE
    slot_M = tl.load(slot + block, mask=live, other=-1).to(tl.int32)
    first_M = tl.load(first + block, mask=live, other=0).to(tl.int32)
    if WINDOW > 0:
        first_M = tl.maximum(first_M, slot_M + 2 + (query % SIZE).to(tl.int32) - WINDOW)
    return query, first_M, slot_M


@triton.jit
def _own_seen(query, u, SIZE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """Which of the blocks' own keys `u` a query sees; both are on the flat axis and broadcast."""
    seen = query // SIZE == u // SIZE
    if CAUSAL:
        seen = seen & (u <= query)
    if WINDOW > 0:
        seen = seen & (query - u < WINDOW)
    return seen


@triton.jit(do_not_specialize=CHANGING)
def attend(
    q, k, v, own_k, own_v, out, lse, slot, first,
    q_row, q_head, k_row, k_head, v_row, v_head, ok_row, ok_head, ov_row, ov_head, num_queries,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest tiles first
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_queries * GROUP
    query, first_M, slot_M = _queries(slot, first, m, live, SIZE, WINDOW, GROUP)
    head = group * GROUP + m % GROUP
    queries = load_rows(q, query * q_row + head * q_head, live, CHANNELS, BLOCK_C)
    low, high, begin, full, end = _tile_of_blocks(
        slot, first, tile, num_queries, SIZE, WINDOW, GROUP, BLOCK_M, BLOCK_N
    )

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(low * SIZE, (high + 1) * SIZE, BLOCK_N):
        u = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        live_U = u < (high + 1) * SIZE
        keys = load_rows(own_k + group * ok_head, u * ok_row, live_U, CHANNELS, BLOCK_C)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
        seen = _own_seen(query[:, None], u[None, :], SIZE, WINDOW, CAUSAL) & live_U[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        fade = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(weights, 1)
        values = load_rows(own_v + group * ov_head, u * ov_row, live_U, CHANNELS, BLOCK_C)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        peak = higher

    k += group * k_head
    v += group * v_head
    acc, peak, total = _attend_keys(
        acc, peak, total, queries, k, v, k_row, v_row, first_M, slot_M, begin, full,
        SCALE, CHANNELS, BLOCK_C, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, peak, total = _attend_keys(
        acc, peak, total, queries, k, v, k_row, v_row, first_M, slot_M, full, end,
        SCALE, CHANNELS, BLOCK_C, BLOCK_N, MASKED=True,
    )  # fmt: skip
    total = tl.where(live, total, 1.0)
    element = query * HEADS + head
    store_rows(out, element * CHANNELS, acc / total[:, None], live, CHANNELS, BLOCK_C)
    tl.store(lse + element, (peak + tl.log2(total)) * LN2, mask=live)


@triton.jit(do_not_specialize=CHANGING)
def query_grad(
    q, k, v, own_k, own_v, out, dout, lse, delta, dq, slot, first,
    q_row, q_head, k_row, k_head, v_row, v_head, ok_row, ok_head, ov_row, ov_head, num_queries,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_queries * GROUP
    query, first_M, slot_M = _queries(slot, first, m, live, SIZE, WINDOW, GROUP)
    head = group * GROUP + m % GROUP
    element = query * HEADS + head
    queries = load_rows(q, query * q_row + head * q_head, live, CHANNELS, BLOCK_C)
    douts = load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C)
    outs = load_rows(out, element * CHANNELS, live, CHANNELS, BLOCK_C)
    lse2 = tl.load(lse + element, mask=live, other=float("inf")) * LOG2E  # inf: no weight
    delta_M = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), 1)
    tl.store(delta + element, delta_M, mask=live)
    low, high, begin, full, end = _tile_of_blocks(
        slot, first, tile, num_queries, SIZE, WINDOW, GROUP, BLOCK_M, BLOCK_N
    )

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for start in tl.range(low * SIZE, (high + 1) * SIZE, BLOCK_N):
        u = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        live_U = u < (high + 1) * SIZE
        keys = load_rows(own_k + group * ok_head, u * ok_row, live_U, CHANNELS, BLOCK_C)
        values = load_rows(own_v + group * ov_head, u * ov_row, live_U, CHANNELS, BLOCK_C)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
        seen = _own_seen(query[:, None], u[None, :], SIZE, WINDOW, CAUSAL) & live_U[None, :]
        weights = tl.where(seen, tl.exp2(scores - lse2[:, None]), 0.0)
        dweights = tl.dot(douts, tl.trans(values), input_precision="ieee")
        dscores = weights * (dweights - delta_M[:, None])
        acc = tl.dot(dscores.to(keys.dtype), keys, acc, input_precision="ieee")
    k += group * k_head
    v += group * v_head
    acc = _query_grad_keys(
        acc, queries, douts, lse2, delta_M, k, v, k_row, v_row, first_M, slot_M, begin, full,
        SCALE, CHANNELS, BLOCK_C, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc = _query_grad_keys(
        acc, queries, douts, lse2, delta_M, k, v, k_row, v_row, first_M, slot_M, full, end,
        SCALE, CHANNELS, BLOCK_C, BLOCK_N, MASKED=True,
    )  # fmt: skip
    store_rows(dq, element * CHANNELS, acc * SCALE, live, CHANNELS, BLOCK_C)


@triton.jit(do_not_specialize=["num_queries"])
def own_grad(
    q, own_k, own_v, dout, lse, delta, dk, dv,
    q_row, q_head, ok_row, ok_head, ov_row, ov_head, num_queries,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of the blocks' own keys, from the queries of these blocks."""
    group = tl.program_id(1)
    u = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_U = u < num_queries
    keys = load_rows(own_k + group * ok_head, u * ok_row, live_U, CHANNELS, BLOCK_C)
    values = load_rows(own_v + group * ov_head, u * ov_row, live_U, CHANNELS, BLOCK_C)
    low = tl.program_id(0) * BLOCK_N // SIZE
    last = tl.minimum((tl.program_id(0) + 1) * BLOCK_N, num_queries) - 1
    stop = (last // SIZE + 1) * SIZE * GROUP

    grad_k = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in tl.range(low * SIZE * GROUP, stop, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        live = m < stop
        query = (m // GROUP).to(tl.int64)
        head = group * GROUP + m % GROUP
        element = query * HEADS + head
        queries = load_rows(q, query * q_row + head * q_head, live, CHANNELS, BLOCK_C)
        douts = load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C)
        lse2 = tl.load(lse + element, mask=live, other=float("inf")) * LOG2E  # inf: no weight
        delta_M = tl.load(delta + element, mask=live, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * (SCALE * LOG2E)
        seen = _own_seen(query[None, :], u[:, None], SIZE, WINDOW, CAUSAL)
        weights = tl.where(seen, tl.exp2(scores - lse2[None, :]), 0.0)
        grad_v = tl.dot(weights.to(douts.dtype), douts, grad_v, input_precision="ieee")
        dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
        dscores = weights * (dweights - delta_M[None, :])
        grad_k = tl.dot(dscores.to(queries.dtype), queries, grad_k, input_precision="ieee")
    element_N = u * (HEADS // GROUP) + group
    store_rows(dk, element_N * CHANNELS, grad_k * SCALE, live_U, CHANNELS, BLOCK_C)
    store_rows(dv, element_N * CHANNELS, grad_v, live_U, CHANNELS, BLOCK_C)


def fused_blocks(
    q_NJHC: Tensor,
    context: KeysValues,
    own: KeysValues,
    rows: BlockRows,
    sight: Sight,
    again: Again | None = None,
) -> Tensor:
    """`attention.block_attention` on a GPU."""
    out: Tensor = _FusedBlocks.apply(rows, sight, again, q_NJHC, *context, *own)
    return out


class _FusedBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: BlockRows, sight: Sight, again: Again | None, *tensors: Tensor
    ) -> Tensor:
        job = BlockJob(rows, sight, *tensors)
        out, lse = job.attend()
        ctx.rows, ctx.sight = rows, sight
        keep_inputs(ctx, again, tensors, out, lse)
        return out.view(tensors[0].shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, out, lse = kept_inputs(ctx)
        job = BlockJob(ctx.rows, ctx.sight, *tensors)
        dout = grads[0].contiguous().flatten(0, 1)
        dq, delta = job.query_grad(out, dout, lse)
        context_grads = job.context_grad(dout, lse, delta)
        own_grads = job.own_grad(dout, lse, delta)
        return None, None, None, dq.view(tensors[0].shape), *context_grads, *own_grads


class BlockJob(Job):
    """The tensors of one call, with queries and the blocks' own keys on one flat axis."""

    def __init__(
        self,
        blocks: BlockRows,
        sight: Sight,
        q_NJHC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        keys_NJGC: Tensor,
        values_NJGC: Tensor,
    ) -> None:
        flat = blocks.flat(sight.window)
        super().__init__(q_NJHC.flatten(0, 1), k_TGC, v_TGC, flat, Chain([], []))
        own_pair = Chain.of([keys_NJGC.flatten(0, 1), values_NJGC.flatten(0, 1)])
        self.blocks, self.sight, self.own_shape = blocks, sight, keys_NJGC.shape
        (self.own_k,), (self.own_v,) = own_pair.keys, own_pair.values
        self.own_strides = [step for x in (self.own_k, self.own_v) for step in x.stride()[:2]]
        self.starts_at = (blocks.slot_N, blocks.first_N)
        self.sees = {"SIZE": blocks.size, "WINDOW": sight.window or 0, "CAUSAL": sight.causal}

    def attend(self) -> tuple[Tensor, Tensor]:
        out = self.q.new_empty(self.q.shape)
        lse = self.q.new_empty(self.q.shape[:2], dtype=torch.float32)
        options = self.options("attend")
        if len(self.rows):
            with self.device:
                attend[self.grid(options)](
                    self.q, self.k, self.v, self.own_k, self.own_v, out, lse, *self.starts_at,
                    *self.qkv_strides, *self.own_strides, len(self.rows), **self.sees, **options,
                )  # fmt: skip
        return out, lse

    def query_grad(self, out: Tensor, dout: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        dq, delta = self.q.new_empty(self.q.shape), torch.empty_like(lse)
        options = self.options("query_grad")
        if len(self.rows):
            with self.device:
                query_grad[self.grid(options)](
                    self.q, self.k, self.v, self.own_k, self.own_v, out, dout, lse, delta, dq,
                    *self.starts_at, *self.qkv_strides, *self.own_strides, len(self.rows),
                    **self.sees, **options,
                )  # fmt: skip
        return dq, delta

    def context_grad(self, dout: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """dk, dv of the context. With a window, the rows that see a range of keys are bounded by
        what the first query of each block sees, since it sees furthest back; within these bounds
        every row is masked individually."""
        if self.sight.window is None or len(self.rows) == 0:
            return self.key_grad(dout, lse, delta)
        reach = self.blocks.slot_N + 2 - self.sight.window
        lowest = torch.maximum(self.blocks.first_N, reach).repeat_interleave(self.blocks.size)
        exact, self.order = self.order, (self.rows.order_N, self.rows.slot_N, lowest)
        bounds, count = self._row_bounds()
        bounds[2].fill_(-1)  # mask all rows: none is assumed to see all keys of a range
        dk_TGC, dv_TGC = (self.k.new_empty(self.k.shape) for _ in range(2))
        options = self.options("key_grad")
        with self.device:
            key_grad[(triton.cdiv(len(self.k), options["BLOCK_N"]), self.groups)](
                self.q, self.k, self.v, dout, lse, delta, dk_TGC, dv_TGC, *exact,
                bounds, *self.qkv_strides, len(self.k), count, GRANULE=GRANULE, **options,
            )  # fmt: skip
        return dk_TGC, dv_TGC

    def own_grad(self, dout: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = (self.own_k.new_empty(self.own_k.shape) for _ in range(2))
        options = self.options("key_grad")
        if len(self.rows):
            with self.device:
                own_grad[(triton.cdiv(len(self.rows), options["BLOCK_N"]), self.groups)](
                    self.q, self.own_k, self.own_v, dout, lse, delta, dk, dv,
                    *self.q.stride()[:2], *self.own_strides, len(self.rows),
                    **self.sees, **options,
                )  # fmt: skip
        return dk.view(self.own_shape), dv.view(self.own_shape)
