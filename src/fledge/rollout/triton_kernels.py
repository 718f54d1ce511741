# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rollout attention as Triton kernels; `triton_attention.py` launches them.

A *tile* is BLOCK_M consecutive (row, query head) pairs of one key head, rows in slot order: pair m
is row order[m // GROUP], head m % GROUP, so any number of query heads per key head fills a tile.
Rows sorted by slot are sorted by document too. So a tile's keys are one interval, read off its
first and its last row, and the rows that can see a block of keys are one interval as well.

Four kernels, none with atomics, so that results repeat bit for bit:

    attend        one pass over the tile's keys, the row's own chain first, one running softmax
    query_grad    dq: the same walk; also leaves delta = sum(out * dout) for the next two
    key_grad      dk, dv: one program per block of keys walks over the rows that see it
    chain_grad    dk, dv of the chains: each belongs to one row

and `row_bounds` tells `key_grad` its intervals. Scores, softmax and sums are fp32. Sizes that
change from batch to batch are plain arguments that Triton does not specialise on: one compilation
serves them all. Only shapes of the model, and the longest chain, are compiled in.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING_YET = tl.constexpr(-1e30)  # a running maximum that, unlike -inf, can be subtracted


@triton.jit
def _load_rows(base, offset_R, live_R, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
    """[rows, BLOCK_C] from element offsets; zero beyond the channels and where nothing lives."""
    c = tl.arange(0, BLOCK_C)
    live = live_R[:, None]
    if CHANNELS != BLOCK_C:
        live = live & (c[None, :] < CHANNELS)
    return tl.load(base + offset_R[:, None] + c[None, :], mask=live, other=0.0)


@triton.jit
def _store_rows(base, offset_R, value, live_R, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr):
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


# --- forward -----------------------------------------------------------------------------------


@triton.jit
def _attend_keys(
    acc, peak_M, total_M, q, k, v, k_row, v_row, first_M, slot_M, begin, end,
    SCALE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, end) to a running softmax."""
    for start in tl.range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < end
        keys = _load_rows(k, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
        if MASKED:
            seen = (n[None, :] >= first_M[:, None]) & (n[None, :] <= slot_M[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher_M = tl.maximum(peak_M, tl.max(scores, 1))
        fade_M = tl.exp2(peak_M - higher_M)
        weights = tl.exp2(scores - higher_M[:, None])
        total_M = total_M * fade_M + tl.sum(weights, 1)
        values = _load_rows(v, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)
        acc = acc * fade_M[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        peak_M = higher_M
    return acc, peak_M, total_M


@triton.jit(do_not_specialize=["order", "slot", "first", "num_rows", "depth"])
def attend(
    q, k, v, chain_k, chain_v, out, lse, order, slot, first,
    q_row, q_head, k_row, k_head, v_row, v_head, ck_row, ck_head, cv_row, cv_head,
    num_rows, depth,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_rows * GROUP
    row = tl.load(order + m // GROUP, mask=live, other=0)
    head = group * GROUP + m % GROUP
    queries = _load_rows(q, row * q_row + head * q_head, live, CHANNELS, BLOCK_C)

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    peak = tl.full([BLOCK_M], NOTHING_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for j in tl.static_range(MAX_CHAIN):
        if j < depth:
            keys = _load_rows(chain_k[j] + group * ck_head, row * ck_row, live, CHANNELS, BLOCK_C)
            values = _load_rows(chain_v[j] + group * cv_head, row * cv_row, live, CHANNELS, BLOCK_C)
            score = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1) * (SCALE * LOG2E)
            higher = tl.maximum(peak, score)
            fade = tl.exp2(peak - higher)
            weight = tl.exp2(score - higher)
            total = total * fade + weight
            acc = acc * fade[:, None] + weight[:, None] * values.to(tl.float32)
            peak = higher

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
    _store_rows(out, element * CHANNELS, acc / total[:, None], live, CHANNELS, BLOCK_C)
    tl.store(lse + element, (peak + tl.log2(total)) * LN2, mask=live)


# --- backward: queries -------------------------------------------------------------------------


@triton.jit
def _query_grad_keys(
    acc, q, dout, lse2_M, delta_M, k, v, k_row, v_row, first_M, slot_M, begin, end,
    SCALE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < end
        keys = _load_rows(k, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)
        values = _load_rows(v, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * (SCALE * LOG2E)
        weights = tl.exp2(scores - lse2_M[:, None])
        if MASKED:
            seen = (n[None, :] >= first_M[:, None]) & (n[None, :] <= slot_M[:, None])
            weights = tl.where(seen, weights, 0.0)
        dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
        dscores = weights * (dweights - delta_M[:, None])
        acc = tl.dot(dscores.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["order", "slot", "first", "num_rows", "depth"])
def query_grad(
    q, k, v, chain_k, chain_v, out, dout, lse, delta, dq, order, slot, first,
    q_row, q_head, k_row, k_head, v_row, v_head, ck_row, ck_head, cv_row, cv_head,
    num_rows, depth,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DELTA_GIVEN: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_rows * GROUP
    row = tl.load(order + m // GROUP, mask=live, other=0)
    head = group * GROUP + m % GROUP
    element = row * HEADS + head
    queries = _load_rows(q, row * q_row + head * q_head, live, CHANNELS, BLOCK_C)
    douts = _load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C)
    lse2 = tl.load(lse + element, mask=live, other=float("inf")) * LOG2E  # inf: no weight
    if DELTA_GIVEN:
        delta_M = tl.load(delta + element, mask=live, other=0.0)
    else:
        outs = _load_rows(out, element * CHANNELS, live, CHANNELS, BLOCK_C)
        delta_M = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), 1)
        tl.store(delta + element, delta_M, mask=live)

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for j in tl.static_range(MAX_CHAIN):
        if j < depth:
            keys = _load_rows(chain_k[j] + group * ck_head, row * ck_row, live, CHANNELS, BLOCK_C)
            values = _load_rows(chain_v[j] + group * cv_head, row * cv_row, live, CHANNELS, BLOCK_C)
            score = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1) * (SCALE * LOG2E)
            dweight = tl.sum(douts.to(tl.float32) * values.to(tl.float32), 1)
            dscore = tl.exp2(score - lse2) * (dweight - delta_M)
            acc += dscore[:, None] * keys.to(tl.float32)

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
    _store_rows(dq, element * CHANNELS, acc * SCALE, live, CHANNELS, BLOCK_C)


# --- backward: keys ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["order", "slot", "first", "num_rows", "num_bounds", "steps"])
def row_bounds(
    order, slot, first, bounds, num_rows, num_bounds, steps,
    GRANULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For the key g * GRANULE of every g, rows (in order) with slot < key, first < key and <= key.

    Each count is a binary search, whose number of steps the host knows; bounds is [3, num_bounds].
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
    """Add what the (row, head) pairs [begin, end) say about a block of keys."""
    for start in tl.range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        live = m < end
        row = tl.load(order + m // GROUP, mask=live, other=0)
        head = group * GROUP + m % GROUP
        element = row * HEADS + head
        queries = _load_rows(q, row * q_row + head * q_head, live, CHANNELS, BLOCK_C)
        douts = _load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C)
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
    keys = _load_rows(k + group * k_head, n.to(tl.int64) * k_row, live, CHANNELS, BLOCK_C)
    values = _load_rows(v + group * v_head, n.to(tl.int64) * v_row, live, CHANNELS, BLOCK_C)

    # Rows [begin, end) see some of these keys; rows [full, end) see all of them, provided that
    # none of their documents begins inside the block.
    here = block * (BLOCK_N // GRANULE)
    after = tl.minimum(here + BLOCK_N // GRANULE, num_bounds - 1)
    begin = tl.load(bounds + here)
    end = tl.load(bounds + num_bounds + after)
    one_document = tl.load(bounds + 2 * num_bounds + here) == end
    full = tl.where(one_document, tl.minimum(tl.load(bounds + after), end), end)

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
    _store_rows(dk, element * CHANNELS, grad_k * SCALE, live, CHANNELS, BLOCK_C)
    _store_rows(dv, element * CHANNELS, grad_v, live, CHANNELS, BLOCK_C)


@triton.jit(do_not_specialize=["num_rows", "depth"])
def chain_grad(
    q, chain_k, chain_v, dout, lse, delta, dchain_k, dchain_v,
    q_row, q_head, ck_row, ck_head, cv_row, cv_head, num_rows, depth,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MAX_CHAIN: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dk, dv of every chain key of a block of rows, summed over the query heads of its group."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < num_rows
    own = (row * (HEADS // GROUP) + group) * CHANNELS
    for j in tl.static_range(MAX_CHAIN):
        if j < depth:
            keys = _load_rows(chain_k[j] + group * ck_head, row * ck_row, live, CHANNELS, BLOCK_C)
            values = _load_rows(chain_v[j] + group * cv_head, row * cv_row, live, CHANNELS, BLOCK_C)
            grad_k = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
            grad_v = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
            for r in range(GROUP):
                head = group * GROUP + r
                element = row * HEADS + head
                queries = _load_rows(
                    q + head * q_head, row * q_row, live, CHANNELS, BLOCK_C
                ).to(tl.float32)  # fmt: skip
                douts = _load_rows(dout, element * CHANNELS, live, CHANNELS, BLOCK_C).to(tl.float32)
                lse2 = tl.load(lse + element, mask=live, other=0.0) * LOG2E
                delta_R = tl.load(delta + element, mask=live, other=0.0)
                score = tl.sum(queries * keys.to(tl.float32), 1) * (SCALE * LOG2E)
                weight = tl.exp2(score - lse2)
                dscore = weight * (tl.sum(douts * values.to(tl.float32), 1) - delta_R)
                grad_k += dscore[:, None] * queries
                grad_v += weight[:, None] * douts
            _store_rows(dchain_k[j], own, grad_k * SCALE, live, CHANNELS, BLOCK_C)
            _store_rows(dchain_v[j], own, grad_v, live, CHANNELS, BLOCK_C)
