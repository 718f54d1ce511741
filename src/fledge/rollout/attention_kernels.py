# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels of rollout attention: forward pass and gradients.

A *tile* is BLOCK_M consecutive (row, query head) pairs of one key head, rows in slot order: pair m
is row order[m // GROUP], head m % GROUP, so any number of query heads per key head fills a tile.
Rows sorted by slot are also sorted by document. So a tile's keys are one interval, determined by
its first and last row, and the rows that can see a block of keys are one interval as well.

The kernels use no atomics, so results are reproducible bit for bit:

    attend        one pass over the tile's keys, the row's own chain first, one running softmax
    query_grad    dq: the same pass; also stores delta = sum(out * dout), which the gradients of
                  the keys need (`key_grad_kernels.py`)

The chain is a tuple of tensors, one per depth, of each of which a row reads its own row (EAGLE-3:
all rows have the same depth). If NESTED, it is one tensor with the depths one after another, each
beginning at its entry of `starts`, and rows of all depths are in one call (P-EAGLE: the row at
place i of its depth reads place i of each depth up to its own).

If OWN, rows also see the keys [own_first, own_last] of another tensor (DFlash, DSpark: those of
their block), and both ends rise from row to row. If FLOORED, `first` does not rise with the slots,
but `floor`, which is never above it, does (a sliding window over blocks).

Scores, softmax and sums are fp32. Sizes that change from batch to batch are plain arguments that
Triton does not specialize on, so one compilation serves them all. Only the shapes of the model and
the longest chain are compile-time constants.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING_YET = tl.constexpr(-1e30)  # initial running maximum; can be subtracted, unlike -inf
# Arguments that change from batch to batch.
CHANGING = [
    *("order", "slot", "first", "floor", "starts", "own_last", "own_first"),
    *("num_rows", "depth", "first_chain"),
]


@triton.jit
def load_rows(base, offset_R, live_R, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """[rows, BLOCK_C] from element offsets; zero beyond the channels and for rows not live."""
    c = tl.arange(0, BLOCK_C)
    live = live_R[:, None]
    if CHANNELS != BLOCK_C:
        live = live & (c[None, :] < CHANNELS)
    return tl.load(base + offset_R[:, None] + c[None, :], mask=live, other=0.0)


@triton.jit
def store_rows(base, offset_R, value, live_R, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.arange(0, BLOCK_C)
    live = live_R[:, None]
    if CHANNELS != BLOCK_C:
        live = live & (c[None, :] < CHANNELS)
    pointers = base + offset_R[:, None] + c[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=live)


@triton.jit
def _tile_keys(
    order, slot, first, floor, tile, num_rows, GROUP, BLOCK_M, BLOCK_N, FLOORED: tl.constexpr
):
    """The tile's first and last row, and (begin, full, end): the tile sees keys [begin, end), all
    of its rows see [begin, full)."""
    last_pair = tl.minimum((tile + 1) * BLOCK_M, num_rows * GROUP) - 1
    lowest = tl.load(order + tile * BLOCK_M // GROUP)
    highest = tl.load(order + last_pair // GROUP)
    begin = tl.load(floor + lowest).to(tl.int32)
    end = tl.load(slot + highest).to(tl.int32) + 1
    full = begin
    if not FLOORED:
        common = tl.load(slot + lowest).to(tl.int32) + 1 - begin
        one_document = tl.load(first + highest).to(tl.int32) == begin
        full = begin + tl.where(one_document, common // BLOCK_N * BLOCK_N, 0)
    return lowest, highest, begin, full, end


@triton.jit
def _place_in_rollouts(row, starts, depth, first_chain):
    """The depth of each row of P-EAGLE's flat axis, and its place among the rows of that depth."""
    chain_row = row - first_chain
    row_depth = tl.zeros_like(row)
    begin = tl.zeros_like(row)
    for j in range(depth):
        start = tl.load(starts + j)
        row_depth += tl.where(chain_row >= start, 1, 0)
        begin = tl.where(chain_row >= start, start, begin)
    return row_depth, chain_row - begin


# --- forward -----------------------------------------------------------------------------------


@triton.jit
def _attend_own(acc, peak_M, total_M, q, keys, values, has_M, SCALE: tl.constexpr):
    """Add one key of the row's own chain to its running softmax, for rows that have one."""
    score_M = tl.sum(q.to(tl.float32) * keys.to(tl.float32), 1) * (SCALE * LOG2E)
    score_M = tl.where(has_M, score_M, float("-inf"))
    higher_M = tl.maximum(peak_M, score_M)
    fade_M = tl.exp2(peak_M - higher_M)
    weight_M = tl.exp2(score_M - higher_M)
    acc = acc * fade_M[:, None] + weight_M[:, None] * values.to(tl.float32)
    return acc, higher_M, total_M * fade_M + weight_M


@triton.jit
def _attend_keys(
    acc, peak_M, total_M, q, k, v, k_row, v_row, first_M, slot_M, begin, end,
    SCALE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) to a running softmax."""
    for start in tl.range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < end
        keys = load_rows(k, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
        if MASKED:
            seen = (n[None, :] >= first_M[:, None]) & (n[None, :] <= slot_M[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher_M = tl.maximum(peak_M, tl.max(scores, 1))
        fade_M = tl.exp2(peak_M - higher_M)
        weights = tl.exp2(scores - higher_M[:, None])
        total_M = total_M * fade_M + tl.sum(weights, 1)
        values = load_rows(v, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)
        acc = acc * fade_M[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        peak_M = higher_M
    return acc, peak_M, total_M


@triton.jit(do_not_specialize=CHANGING)
def attend(
    q, k, v, chain_k, chain_v, own_k, own_v, out, lse,
    order, slot, first, floor, starts, own_last, own_first,
    q_row, q_head, k_row, k_head, v_row, v_head, ck_row, ck_head, cv_row, cv_head,
    ok_row, ok_head, ov_row, ov_head, num_rows, depth, first_chain,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NESTED: tl.constexpr, OWN: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest tiles first
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_rows * GROUP
    row = tl.load(order + m // GROUP, mask=live, other=0)
    head = group * GROUP + m % GROUP
    queries = load_rows(q, row * q_row + head * q_head, live, CHANNELS, BLOCK_C)

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for j in tl.static_range(MAX_CHAIN):
        if j < depth:
            keys = load_rows(chain_k[j] + group * ck_head, row * ck_row, live, CHANNELS, BLOCK_C)
            values = load_rows(chain_v[j] + group * cv_head, row * cv_row, live, CHANNELS, BLOCK_C)
            acc, peak, total = _attend_own(acc, peak, total, queries, keys, values, live, SCALE)
    if NESTED:
        row_depth, place = _place_in_rollouts(row, starts, depth, first_chain)
        for j in range(depth):
            at = tl.load(starts + j) + place
            has = live & (j < row_depth)
            keys = load_rows(chain_k[0] + group * ck_head, at * ck_row, has, CHANNELS, BLOCK_C)
            values = load_rows(chain_v[0] + group * cv_head, at * cv_row, has, CHANNELS, BLOCK_C)
            acc, peak, total = _attend_own(acc, peak, total, queries, keys, values, has, SCALE)

    lowest, highest, begin, full, end = _tile_keys(
        order, slot, first, floor, tile, num_rows, GROUP, BLOCK_M, BLOCK_N, FLOORED
    )
    if OWN:
        own_first_M = tl.load(own_first + row, mask=live, other=0).to(tl.int32)
        own_last_M = tl.load(own_last + row, mask=live, other=-1).to(tl.int32)
        acc, peak, total = _attend_keys(
            acc, peak, total, queries, own_k + group * ok_head, own_v + group * ov_head,
            ok_row, ov_row, own_first_M, own_last_M, tl.load(own_first + lowest).to(tl.int32),
            tl.load(own_last + highest).to(tl.int32) + 1,
            SCALE, CHANNELS, BLOCK_C, BLOCK_N, MASKED=True,
        )  # fmt: skip
    first_M = tl.load(first + row, mask=live, other=0).to(tl.int32)
    slot_M = tl.load(slot + row, mask=live, other=-1).to(tl.int32)
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
    element = row * HEADS + head
    store_rows(out, element * CHANNELS, acc / total[:, None], live, CHANNELS, BLOCK_C)
    tl.store(lse + element, (peak + tl.log2(total)) * LN2, mask=live)


# --- backward: queries -------------------------------------------------------------------------


@triton.jit
def _query_grad_own(acc, q, dout, lse2_M, delta_M, keys, values, has_M, SCALE: tl.constexpr):
    """Add the gradient from one key of the row's own chain, for rows that have one."""
    score_M = tl.sum(q.to(tl.float32) * keys.to(tl.float32), 1) * (SCALE * LOG2E)
    dweight_M = tl.sum(dout.to(tl.float32) * values.to(tl.float32), 1)
    dscore_M = tl.exp2(score_M - lse2_M) * (dweight_M - delta_M)
    dscore_M = tl.where(has_M, dscore_M, 0.0)
    return acc + dscore_M[:, None] * keys.to(tl.float32)


@triton.jit
def _query_grad_keys(
    acc, q, dout, lse2_M, delta_M, k, v, k_row, v_row, first_M, slot_M, begin, end,
    SCALE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < end
        keys = load_rows(k, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)
        values = load_rows(v, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
        weights = tl.exp2(scores - lse2_M[:, None])
        if MASKED:
            seen = (n[None, :] >= first_M[:, None]) & (n[None, :] <= slot_M[:, None])
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
        dscores = weights * (dweights - delta_M[:, None])
        acc = tl.dot(dscores.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=CHANGING)
def query_grad(
    q, k, v, chain_k, chain_v, own_k, own_v, out, dout, lse, delta, dq,
    order, slot, first, floor, starts, own_last, own_first,
    q_row, q_head, k_row, k_head, v_row, v_head, ck_row, ck_head, cv_row, cv_head,
    ok_row, ok_head, ov_row, ov_head, num_rows, depth, first_chain,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NESTED: tl.constexpr, OWN: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_rows * GROUP
    row = tl.load(order + m // GROUP, mask=live, other=0)
    head = group * GROUP + m % GROUP
    element = row * HEADS + head
    queries = load_rows(q, row * q_row + head * q_head, live, CHANNELS, BLOCK_C)
    douts = load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C)
    lse2 = tl.load(lse + element, mask=live, other=float("inf")) * LOG2E  # inf: no weight
    outs = load_rows(out, element * CHANNELS, live, CHANNELS, BLOCK_C)
    delta_M = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), 1)
    tl.store(delta + element, delta_M, mask=live)

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for j in tl.static_range(MAX_CHAIN):
        if j < depth:
            keys = load_rows(chain_k[j] + group * ck_head, row * ck_row, live, CHANNELS, BLOCK_C)
            values = load_rows(chain_v[j] + group * cv_head, row * cv_row, live, CHANNELS, BLOCK_C)
            acc = _query_grad_own(acc, queries, douts, lse2, delta_M, keys, values, live, SCALE)
    if NESTED:
        row_depth, place = _place_in_rollouts(row, starts, depth, first_chain)
        for j in range(depth):
            at = tl.load(starts + j) + place
            has = live & (j < row_depth)
            keys = load_rows(chain_k[0] + group * ck_head, at * ck_row, has, CHANNELS, BLOCK_C)
            values = load_rows(chain_v[0] + group * cv_head, at * cv_row, has, CHANNELS, BLOCK_C)
            acc = _query_grad_own(acc, queries, douts, lse2, delta_M, keys, values, has, SCALE)

    lowest, highest, begin, full, end = _tile_keys(
        order, slot, first, floor, tile, num_rows, GROUP, BLOCK_M, BLOCK_N, FLOORED
    )
    if OWN:
        own_first_M = tl.load(own_first + row, mask=live, other=0).to(tl.int32)
        own_last_M = tl.load(own_last + row, mask=live, other=-1).to(tl.int32)
        acc = _query_grad_keys(
            acc, queries, douts, lse2, delta_M, own_k + group * ok_head, own_v + group * ov_head,
            ok_row, ov_row, own_first_M, own_last_M, tl.load(own_first + lowest).to(tl.int32),
            tl.load(own_last + highest).to(tl.int32) + 1,
            SCALE, CHANNELS, BLOCK_C, BLOCK_N, MASKED=True,
        )  # fmt: skip
    first_M = tl.load(first + row, mask=live, other=0).to(tl.int32)
    slot_M = tl.load(slot + row, mask=live, other=-1).to(tl.int32)
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
