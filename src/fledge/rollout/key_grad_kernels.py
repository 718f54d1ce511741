# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels of rollout attention: the gradients of keys and values.

    row_bounds         which rows can see a block of keys: one interval, as rows are sorted
    key_grad           dk, dv: one program per block of keys iterates over these rows
    chain_grad         dk, dv of the chains: each belongs to one rollout
    nested_chain_grad  the same for P-EAGLE's chains

`attention_kernels.py` explains the arguments. Results are reproducible: there are no atomics.
"""

import triton
import triton.language as tl

from fledge.rollout.attention_kernels import LOG2E, load_rows, store_rows


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
