# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels of rollout attention: forward pass and gradients.

A *tile* is BLOCK_M consecutive (row, query head) pairs of one key head, rows in slot order: pair m
is row order[m // GROUP], head m % GROUP, so any number of query heads per key head fills a tile.
Rows sorted by slot are also sorted by document. So a tile's keys are one interval, determined by
its first and last row, and the rows that can see a block of keys are one interval as well.

The kernels use no atomics, so results are reproducible bit for bit:

    attend        one pass over the tile's keys, the row's own chain first, one running softmax
    query_grad    dq: the same pass; also stores delta = sum(out * dout) for the kernels below
    key_grad      dk, dv: one program per block of keys iterates over the rows that see it
                  (determined by row_bounds)
    chain_grad    dk, dv of the chains: each belongs to one rollout (nested_chain_grad: P-EAGLE's)

The chain is a tuple of tensors, one per depth, of each of which a row reads its own row (EAGLE-3:
all rows have the same depth). If NESTED, it is one tensor with the depths one after another, each
beginning at its entry of `starts`, and rows of all depths are in one call (P-EAGLE: the row at
place i of its depth reads place i of each depth up to its own).

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
CHANGING = ["order", "slot", "first", "starts", "num_rows", "depth", "first_chain"]


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
def _tile_keys(order, slot, first, tile, num_rows, GROUP, BLOCK_M, BLOCK_N):
    """(begin, full, end): the tile sees keys [begin, end), all of its rows see [begin, full)."""
    last_pair = tl.minimum((tile + 1) * BLOCK_M, num_rows * GROUP) - 1
    lowest = tl.load(order + tile * BLOCK_M // GROUP)
    highest = tl.load(order + last_pair // GROUP)
    begin = tl.load(first + lowest).to(tl.int32)
    end = tl.load(slot + highest).to(tl.int32) + 1
    common = tl.load(slot + lowest).to(tl.int32) + 1 - begin
    one_document = tl.load(first + highest).to(tl.int32) == begin
    full = begin + tl.where(one_document, common // BLOCK_N * BLOCK_N, 0)
    return begin, full, end


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
    q, k, v, chain_k, chain_v, out, lse, order, slot, first, starts,
    q_row, q_head, k_row, k_head, v_row, v_head, ck_row, ck_head, cv_row, cv_head,
    num_rows, depth, first_chain,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NESTED: tl.constexpr,
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

    begin, full, end = _tile_keys(order, slot, first, tile, num_rows, GROUP, BLOCK_M, BLOCK_N)
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
    q, k, v, chain_k, chain_v, out, dout, lse, delta, dq, order, slot, first, starts,
    q_row, q_head, k_row, k_head, v_row, v_head, ck_row, ck_head, cv_row, cv_head,
    num_rows, depth, first_chain,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NESTED: tl.constexpr,
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

    begin, full, end = _tile_keys(order, slot, first, tile, num_rows, GROUP, BLOCK_M, BLOCK_N)
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


# --- gradients of keys and values -----------------------------------------------------------------


@triton.jit(do_not_specialize=["order", "slot", "first", "num_rows", "num_bounds", "steps"])
def row_bounds(
    order, slot, first, bounds, num_rows, num_bounds, steps,
    GRANULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For the key g * GRANULE of every g: the number of rows with slot < key, with first < key, and
    with first <= key.

    Each count is a binary search over rows in slot order; the host passes its number of steps.
    `bounds` is [3, num_bounds].
    """
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = g.to(tl.int64) * GRANULE
    which = tl.program_id(1)
    values = slot
    if which > 0:
        values = first
    if which == 2:
        key += 1
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_rows
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        value = tl.load(values + tl.load(order + middle, mask=open_, other=0))
        low = tl.where(open_ & (value < key), middle + 1, low)
        high = tl.where(open_ & (value >= key), middle, high)
    tl.store(bounds + which * num_bounds + g, low, mask=g < num_bounds)


@triton.jit
def _key_grad_rows(
    dk, dv, keys, values, n, q, dout, lse, delta, order, slot, first, group,
    q_row, q_head, begin, end,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of keys and values from the (row, head) pairs [begin, end)."""
    for start in tl.range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        live = m < end
        row = tl.load(order + m // GROUP, mask=live, other=0)
        head = group * GROUP + m % GROUP
        element = row * HEADS + head
        queries = load_rows(q, row * q_row + head * q_head, live, CHANNELS, BLOCK_C)
        douts = load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C)
        lse2 = tl.load(lse + element, mask=live, other=float("inf")) * LOG2E  # inf: no weight
        delta_M = tl.load(delta + element, mask=live, other=0.0)
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * (SCALE * LOG2E)
        weights = tl.exp2(scores - lse2[None, :])
        if MASKED:
            first_M = tl.load(first + row, mask=live, other=0).to(tl.int32)
            slot_M = tl.load(slot + row, mask=live, other=-1).to(tl.int32)
            seen = (n[:, None] >= first_M[None, :]) & (n[:, None] <= slot_M[None, :])
            weights = tl.where(seen, weights, 0.0)
        dv = tl.dot(weights.to(douts.dtype), douts, dv, input_precision="ieee")
        dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
        dscores = weights * (dweights - delta_M[None, :])
        dk = tl.dot(dscores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["order", "slot", "first", "num_keys", "num_bounds"])
def key_grad(
    q, k, v, dout, lse, delta, dk, dv, order, slot, first, bounds,
    q_row, q_head, k_row, k_head, v_row, v_head, num_keys, num_bounds,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, GRANULE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    group = tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < num_keys
    keys = load_rows(k + group * k_head, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)
    values = load_rows(v + group * v_head, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)

    # Rows [begin, end) see some of these keys; rows [full, end) see all of them, provided that
    # none of their documents begins inside the block.
    low = block * (BLOCK_N // GRANULE)
    high = tl.minimum(low + BLOCK_N // GRANULE, num_bounds - 1)
    begin = tl.load(bounds + low)
    end = tl.load(bounds + num_bounds + high)
    one_document = tl.load(bounds + 2 * num_bounds + low) == end
    full = tl.where(one_document, tl.minimum(tl.load(bounds + high), end), end)

    grad_k = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    grad_k, grad_v = _key_grad_rows(
        grad_k, grad_v, keys, values, n, q, dout, lse, delta, order, slot, first, group,
        q_row, q_head, begin * GROUP, full * GROUP,
        HEADS, GROUP, SCALE, CHANNELS, BLOCK_C, BLOCK_M, MASKED=True,
    )  # fmt: skip
    grad_k, grad_v = _key_grad_rows(
        grad_k, grad_v, keys, values, n, q, dout, lse, delta, order, slot, first, group,
        q_row, q_head, full * GROUP, end * GROUP,
        HEADS, GROUP, SCALE, CHANNELS, BLOCK_C, BLOCK_M, MASKED=False,
    )  # fmt: skip
    element = n.to(tl.int64) * (HEADS // GROUP) + group
    store_rows(dk, element * CHANNELS, grad_k * SCALE, live, CHANNELS, BLOCK_C)
    store_rows(dv, element * CHANNELS, grad_v, live, CHANNELS, BLOCK_C)


@triton.jit
def _key_grad_own(
    grad_k, grad_v, keys, values, q, q_row, q_head, dout, lse, delta, row, live_R, group,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one chain key and value per row, from the row's query heads."""
    for r in range(GROUP):
        head = group * GROUP + r
        element = row * HEADS + head
        queries = load_rows(q + head * q_head, row * q_row, live_R, CHANNELS, BLOCK_C)
        queries = queries.to(tl.float32)
        douts = load_rows(dout, element * CHANNELS, live_R, CHANNELS, BLOCK_C).to(tl.float32)
        lse2 = tl.load(lse + element, mask=live_R, other=float("inf")) * LOG2E  # inf: no weight
        delta_R = tl.load(delta + element, mask=live_R, other=0.0)
        weight = tl.exp2(tl.sum(queries * keys, 1) * (SCALE * LOG2E) - lse2)
        dscore = weight * (tl.sum(douts * values, 1) - delta_R)
        grad_k += dscore[:, None] * queries
        grad_v += weight[:, None] * douts
    return grad_k, grad_v


@triton.jit(do_not_specialize=["num_rows", "depth"])
def chain_grad(
    q, chain_k, chain_v, dout, lse, delta, dchain_k, dchain_v,
    q_row, q_head, ck_row, ck_head, cv_row, cv_head, num_rows, depth,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dk, dv of all chain keys of a block of rows, summed over the query heads of the group."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < num_rows
    offset = (row * (HEADS // GROUP) + group) * CHANNELS
    for j in tl.static_range(MAX_CHAIN):
        if j < depth:
            keys = load_rows(chain_k[j] + group * ck_head, row * ck_row, live, CHANNELS, BLOCK_C)
            values = load_rows(chain_v[j] + group * cv_head, row * cv_row, live, CHANNELS, BLOCK_C)
            grad_k = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
            grad_v = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
            grad_k, grad_v = _key_grad_own(
                grad_k, grad_v, keys.to(tl.float32), values.to(tl.float32), q, q_row, q_head,
                dout, lse, delta, row, live, group, HEADS, GROUP, SCALE, CHANNELS, BLOCK_C,
            )  # fmt: skip
            store_rows(dchain_k[j], offset, grad_k * SCALE, live, CHANNELS, BLOCK_C)
            store_rows(dchain_v[j], offset, grad_v, live, CHANNELS, BLOCK_C)


@triton.jit(do_not_specialize=["starts", "first_chain", "depth"])
def nested_chain_grad(
    q, chain_k, chain_v, dout, lse, delta, dchain_k, dchain_v, starts,
    q_row, q_head, ck_row, ck_head, cv_row, cv_head, first_chain, depth,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`chain_grad` for rows of all depths: key j of a rollout is read by its depths j and deeper.

    `starts` ends with the number of chain rows.
    """
    group = tl.program_id(1)
    j = tl.program_id(2)
    place = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = tl.load(starts + j) + place
    live = at < tl.load(starts + j + 1)
    keys = load_rows(chain_k + group * ck_head, at * ck_row, live, CHANNELS, BLOCK_C)
    values = load_rows(chain_v + group * cv_head, at * cv_row, live, CHANNELS, BLOCK_C)
    grad_k = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    grad_v = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for d in range(j, depth):
        query = tl.load(starts + d) + place
        grad_k, grad_v = _key_grad_own(
            grad_k, grad_v, keys.to(tl.float32), values.to(tl.float32), q, q_row, q_head,
            dout, lse, delta, first_chain + query, query < tl.load(starts + d + 1), group,
            HEADS, GROUP, SCALE, CHANNELS, BLOCK_C,
        )  # fmt: skip
    offset = (at * (HEADS // GROUP) + group) * CHANNELS
    store_rows(dchain_k, offset, grad_k * SCALE, live, CHANNELS, BLOCK_C)
    store_rows(dchain_v, offset, grad_v, live, CHANNELS, BLOCK_C)
