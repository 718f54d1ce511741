"""P-EAGLE's rollouts in rounded sizes, so that a step of each size can be recorded: see `even.py`.

The key axis is as long as the batch. The number of rows of depth 0 is rounded up to a multiple of
some quantum, and all other sizes follow from it: of n supervised positions, sampling keeps at most
a given share at each depth (`cod.kept_shares`), and every depth has room for that many, rounded up
a little.

Padding rows sit on a padding slot, a document of its own. Where a depth has more room than
rollouts, the next ones are followed a depth further than was sampled: rows that no other row sees,
and that do not count in the loss (`HeadElements.real_N`).

Example: rollouts from slots 4 (to depth 2), 5 (to depth 1) and 6, shares 1, 0.7, 0.49, quantum 4;
P is padding, brackets are around what is not real.

    depth 0     4   5   6  (P)         room for 4
    depth 1     4   5  (6)             for 2.8: 3, were it not rounded up to a multiple of 16
    depth 2     4  (5)                 for 1.96: 2

The head's elements are all rows of all depths: the real ones sorted by the slot that they ask for,
the others spread evenly between them. As in `even_blocks.py`, groups of adjacent elements have
their own target slots, every group as many as the one that needs most: a sixteenth more than an
average group could need or, in packs of very short answers, half as much again, and so on.

For 300 packs of chats of 4,096 tokens, with 8 depths and a quantum of 256, layers run 6 % more
rows, the head has 7 % more elements and 12 % more target slots (medians). There are 12 sizes, four
of which cover four fifths of the packs.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fledge.rollout.cod import Bools, Ints
from fledge.rollout.even import ALIGNED, filled, rounded
from fledge.rollout.even_blocks import targets_by_group
from fledge.rollout.parallel_plan import ParallelPlan, Segment, elements_of
from fledge.rollout.plan import HeadElements, QueryRows, query_rows, supervised_so_far, to_device
from fledge.rollout.slots import KeyAxis, Slots

GROUP = 2048  # elements that share target slots: smaller groups differ more
ROOM = 17 / 16  # room for target slots, relative to the need of a group in long documents
CHAIN_ALIGNED = 16  # rows of a depth: efficient for kernels, and little padding in seven depths


def lay_out_evenly(
    slots: Slots,
    deepest_S: Ints,
    shares: Sequence[float],  # [K] largest share of the supervised positions sampled at a depth
    *,
    limit: int | None,  # most rows sampled at a depth beyond 0
    quantum: int,
    device: torch.device,
) -> ParallelPlan:
    """As `parallel_plan.lay_out_parallel` in one segment, with a number of rows of depth 0 that is
    a multiple of `quantum`."""
    supervised_SK, exact = elements_of(slots, deepest_S, len(shares))  # without padding
    axis = _padded(exact, _counts(len(exact.row_key), shares, limit, quantum), len(slots.target))
    assert all(rows <= room for rows, room in zip(exact.counts, axis.counts, strict=True))
    supervised_P = np.concatenate(
        [
            filled(supervised_SK[exact.row_slot[:rows], depth].astype(np.int64), room, 0)
            for depth, (rows, room) in enumerate(zip(exact.counts, axis.counts, strict=True))
        ]
    )
    head, target = _head(axis, supervised_P != 0, sum(shares), device)
    target_M, slot_T, position_T, supervised, step_valid_K = to_device(
        [target, axis.slot, axis.position, supervised_P, supervised_so_far(supervised_SK)], device
    )
    arange = np.arange(len(axis.slot))
    rows = query_rows(axis.row_key, axis.first[axis.row_key], device)
    return ParallelPlan(
        slot_T=slot_T,
        span=None,
        position_T=position_T,
        every=query_rows(arange, axis.first, device),
        depths=(rows,),  # all depths run at once: see the segment
        counts=axis.counts,
        target_M=target_M,
        head=head,
        supervised_P=supervised.bool(),
        step_valid_K=step_valid_K,
        segments=(_segment(axis, rows, device),),
        element_P=None,
    )


def _counts(rows: int, shares: Sequence[float], limit: int | None, quantum: int) -> tuple[int, ...]:
    """[K] room for rows, a function of the rounded number of rows of depth 0."""
    most = rounded(rows, quantum)
    beyond = most if limit is None else min(most, limit)
    room = (min(int(np.ceil(share * most)), beyond) for share in shares[1:])
    return (most, *(min(most, rounded(count, CHAIN_ALIGNED)) for count in room))


def _padded(exact: KeyAxis, counts: tuple[int, ...], tokens: int) -> KeyAxis:
    """The axes with at least one padding slot, and padding rows on the first one."""
    size_T = rounded(tokens + 1, ALIGNED)
    padding = np.arange(len(exact.slot), size_T)
    return KeyAxis(
        slot=filled(exact.slot, size_T, 0),
        first=np.concatenate([exact.first, padding]),
        position=filled(exact.position, size_T, 0),
        row_slot=filled(exact.row_slot, counts[0], 0),
        row_key=filled(exact.row_key, counts[0], padding[0]),
        counts=counts,
    )


def _segment(axis: KeyAxis, rows: QueryRows, device: torch.device) -> Segment:
    counts = axis.counts[1:]
    chain = np.concatenate([axis.row_key[:count] for count in (0, *counts)])
    depth = np.repeat(np.arange(1, len(counts) + 1), counts)
    every = np.concatenate([np.arange(len(axis.slot)), chain])
    asking = np.concatenate([axis.row_key, chain])
    starts_K, position_M = to_device(
        [np.cumsum((0, *counts)), axis.position[chain] + depth], device
    )
    return Segment(
        begin=0,
        end=len(axis.slot),
        counts=counts,
        starts_K=starts_K,
        chain_position_M=position_M,
        every=query_rows(every, axis.first[every], device),
        anchor_N=rows.slot_N,
        asking=query_rows(asking, axis.first[asking], device),
        gathering=None,
    )


def _head(
    axis: KeyAxis, real_P: Bools, depths_a_slot: float, device: torch.device
) -> tuple[HeadElements, Ints]:
    """All rows of all depths, and the target slots of their groups."""
    depth_P = np.repeat(np.arange(len(axis.counts)), axis.counts)
    asked_P = np.concatenate([axis.row_slot[:n] + depth for depth, n in enumerate(axis.counts)])
    element, real = _in_order(asked_P, real_P)
    group = -(-len(element) // -(-len(element) // GROUP))  # all of equal size
    step = int(np.ceil(ROOM * group / depths_a_slot / 2))  # the usual room is two of these
    target, target_X1, spread = targets_by_group(
        asked_P[element, None], real[:, None], group, step=step
    )
    element_X, depth_X, target_X, real_X = to_device(
        [element, depth_P[element], target_X1[:, 0], real.astype(np.int64)], device
    )
    lowest = np.arange(len(element)) // group * spread
    return HeadElements(
        element_X, depth_X, target_X, lowest, real_X.bool(), (group, spread)
    ), target


def _in_order(asked_P: Ints, real_P: Bools) -> tuple[Ints, Bools]:
    """The elements, real ones sorted by the slot that they ask for, and which of them are real. The
    others are spread evenly between them, so that every group has equally many."""
    ordered, others = np.flatnonzero(real_P), np.flatnonzero(~real_P)
    ordered = ordered[np.argsort(asked_P[ordered], kind="stable")]
    real = np.zeros_like(real_P)
    real[np.arange(len(ordered)) * len(real) // max(1, len(ordered))] = True
    element = np.empty(len(real), dtype=np.int64)
    element[real], element[~real] = ordered, others
    return element, real
