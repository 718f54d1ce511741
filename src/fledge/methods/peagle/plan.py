"""The plan of a P-EAGLE batch: a rollout plan whose depths run at once, segment by segment.

All depths of a segment form one flat axis Q: the segment's depth-0 slots, then the *chain rows*,
depth 1, depth 2, ... end to end. Chain rows keep the order of `plan.py` (deepest rollouts first):
the rows of depth d are the first `counts[d - 1]` of depth 1, row i of every depth is one rollout.

With one segment that is the whole batch. With S segments (the paper's Algorithm 1), a depth-0 slot
belongs to the segment of its position and a chain row to that of its anchor + 1; keys of earlier
segments are passed on, so the result is the same and only one segment's activations are alive.

Example: slots 0..5, rollouts from anchor 1 (to depth 2) and anchor 2 (to depth 1), two segments of
slots 0..2 and 3..5.

    segment 0   Q = slot 0, slot 1, slot 2, (1, 1), (1, 2)     counts 1, 1
    segment 1   Q = slot 3, slot 4, slot 5, (2, 1)             counts 1, 0
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.core.transfer import send
from fledge.rollout.context import ContextRanks, Gathering, Part, gathering, owners, part_of
from fledge.rollout.plan import (
    QueryRows,
    RolloutPlan,
    lay_out,
    lay_out_evenly,
    query_rows,
    to_device,
)
from fledge.rollout.slots import (
    Bools,
    Ints,
    KeyAxis,
    RowMasks,
    Slots,
    flatten_slots,
    kept_shares,
    key_axis,
    rounded,
    sample_depths,
)


@dataclass(frozen=True)
class Segment:
    begin: int  # its depth-0 slots are [begin, end) of the key axis, or of this rank's part of it
    end: int
    counts: tuple[int, ...]  # chain rows at depths 1, 2, ...
    starts_K: Tensor  # where the chain rows of each of these depths begin, and where they end
    chain_position_M: Tensor  # rotary positions of the chain rows: anchor's + depth
    every: QueryRows  # its slots and chain rows, the queries of all layers but the last
    anchor_N: Tensor  # the slots that are queries of the last layer, counted from `begin`
    asking: QueryRows  # these and the chain rows
    gathering: Gathering | None  # of the segment's keys, when ranks share the rows


@dataclass(frozen=True, kw_only=True)
class ParallelPlan(RolloutPlan):
    segments: tuple[Segment, ...]
    element_P: Tensor | None  # index of each element in the segments' rows; None: in order

    def in_order(self, rows_PE: Tensor) -> Tensor:
        """The segments' last-layer rows end to end -> all depths' rows end to end."""
        return rows_PE if self.element_P is None else rows_PE.index_select(0, self.element_P)


def plan_parallel(
    masks: RowMasks,
    *,
    num_depths: int,
    ratio: float,
    ratio_min: float,
    seed: int,
    partitions: int = 1,
    device: torch.device | None = None,
    ranks: ContextRanks | None = None,
    quantum: int = 0,
) -> ParallelPlan:
    """Sample the rollouts of a batch and lay them out; one host sync, as in `plan_rollout`. With
    `ranks`, which all read the same rows, the plan is this rank's part. With `quantum`, sizes are
    rounded up so that the same few recur (`lay_out_evenly`)."""
    slots = flatten_slots(masks)
    deepest_S = sample_depths(
        slots.documents,
        num_depths=num_depths,
        ratio=ratio,
        ratio_min=ratio_min,
        seed=seed,
    )
    device = device or masks.loss_mask.device
    if quantum:
        shares = kept_shares(num_depths, ratio, ratio_min)
        return _lay_out_evenly(slots, deepest_S, shares, quantum=quantum, device=device)
    return lay_out_parallel(
        slots, deepest_S, num_depths, partitions=partitions, device=device, ranks=ranks
    )


def lay_out_parallel(
    slots: Slots,
    deepest_S: Ints,
    num_depths: int,
    *,
    partitions: int = 1,
    device: torch.device,
    ranks: ContextRanks | None = None,
) -> ParallelPlan:
    """The plan of a given draw: the deepest depth of each slot's rollout."""
    supervised_SK, axis = elements_of(slots, deepest_S, num_depths)
    ends = _boundaries(axis, partitions)
    part, share = None, None
    if ranks is not None:
        # with several layers, a slot costs as much as an element
        owner = owners(axis, ranks.size, element=1, ends=ends)
        part = part_of(slots, supervised_SK, axis, owner, ranks.rank)
        slots, axis = part.slots, part.axis
        supervised_SK &= part.mine[:, None]
        share = part.share(ranks, device, depths=1)
    plan = lay_out(slots, supervised_SK, axis, device=device)
    segments, element_P = _Segmenter(axis, part, ranks, device).segments(ends)
    return ParallelPlan(**vars(plan) | {"share": share}, segments=segments, element_P=element_P)


def elements_of(slots: Slots, deepest_S: Ints, num_depths: int) -> tuple[Bools, KeyAxis]:
    """Which (slot, depth) pairs a draw supervises, and the axes that they need."""
    supervised_SK = np.zeros((len(deepest_S), num_depths), dtype=np.bool_)
    supervised_SK[:, 0] = slots.target
    supervised_SK[:, 1:] = deepest_S[:, None] >= np.arange(1, num_depths)
    last_S = np.where(supervised_SK.any(axis=1), deepest_S, -1)
    return supervised_SK, key_axis(slots, last_S, num_depths)


def _boundaries(axis: KeyAxis, partitions: int) -> list[int]:
    """Ends of the segments on the key axis: rows are as evenly split as whole positions allow."""
    size = len(axis.slot)
    load = np.ones(size, dtype=np.int64)
    for count in axis.counts[1:]:
        load += np.bincount(_chain_home(axis)[:count], minlength=size)
    shares = np.arange(1, partitions + 1) * load.sum() / partitions
    ends = np.searchsorted(np.cumsum(load), shares - 0.5) + 1
    return [int(end) for end in np.unique(np.minimum(ends, size))] if size else [0]


def _chain_home(axis: KeyAxis) -> Ints:
    """[N] the slot that determines in which segment a rollout runs."""
    home: Ints = np.minimum(axis.row_key + 1, len(axis.slot) - 1)
    return home


class _Segmenter:
    """Cuts the rows of an axis, a rank's own or all of them, into segments."""

    def __init__(
        self, axis: KeyAxis, part: Part | None, ranks: ContextRanks | None, device: torch.device
    ) -> None:
        self.axis, self.part, self.ranks, self.device = axis, part, ranks, device
        self.own = np.arange(len(axis.slot), dtype=np.int64) if part is None else part.own

    def segments(self, ends: list[int]) -> tuple[tuple[Segment, ...], Tensor | None]:
        """The segments, and the index of each element in their rows."""
        begins = [0, *ends[:-1]]
        segments, elements = zip(*map(self.cut, begins, ends), strict=True)
        if len(segments) == 1:
            return segments, None
        index = np.argsort(np.concatenate(elements))
        return segments, send(torch.from_numpy(index), self.device)

    def cut(self, begin: int, end: int) -> tuple[Segment, Ints]:
        """One segment, and the element (all depths' rows end to end) of each last-layer row."""
        axis, device, chain_home = self.axis, self.device, _chain_home(self.axis)
        anchors = np.flatnonzero((axis.row_key >= begin) & (axis.row_key < end))
        chains = np.flatnonzero((chain_home >= begin) & (chain_home < end))
        offsets = np.cumsum((0, *axis.counts))
        rows = [chains[chains < count] for count in axis.counts[1:]]
        elements = [anchors, *(offsets[depth] + row for depth, row in enumerate(rows, start=1))]
        chain = axis.row_key[np.concatenate([anchors[:0], *rows])]
        counts = tuple(len(row) for row in rows)
        depth = np.repeat(np.arange(1, len(rows) + 1), np.array(counts, dtype=np.int64))
        first, last = (int(at) for at in np.searchsorted(self.own, [begin, end]))
        every = np.concatenate([self.own[first:last], chain])
        asking = np.concatenate([axis.row_key[anchors], chain])
        anchor = np.searchsorted(self.own, axis.row_key[anchors]) - first
        starts = np.cumsum((0, *counts))
        position_M, anchor_N, starts_K = to_device(
            [axis.position[chain] + depth, anchor, starts], device
        )
        segment = Segment(
            begin=first,
            end=last,
            counts=counts,
            starts_K=starts_K,
            chain_position_M=position_M,
            every=query_rows(every, axis.first[every], device),
            anchor_N=anchor_N,
            asking=query_rows(asking, axis.first[asking], device),
            gathering=self._gathering(begin, end),
        )
        return segment, np.concatenate(elements)

    def _gathering(self, begin: int, end: int) -> Gathering | None:
        if self.part is None or self.ranks is None:
            return None
        return gathering(self.part.owner[begin:end], self.ranks, self.device)


# --- padded plan ---------------------------------------------------------------------------------
# P-EAGLE's rollouts in rounded sizes, for steps that are recorded (`rollout/plan.py`).
#
# The number of rows of depth 0 is rounded up to a multiple of some quantum, and the others follow
# from it: of n supervised positions, sampling keeps at most a given share at each depth
# (`slots.kept_shares`), and every depth has room for that many, rounded up a little. Where it has
# more room than rollouts, the next ones are followed a depth further than was sampled.
#
# Example: rollouts from slots 4 (to depth 2), 5 (to depth 1) and 6, shares 1, 0.7, 0.49, quantum 4;
# P is padding, brackets are around what is not real.
#
#     depth 0     4   5   6  (P)         room for 4
#     depth 1     4   5  (6)             for 2.8: 3, were it not rounded up to a multiple of 16
#     depth 2     4  (5)                 for 1.96: 2

CHAIN_ALIGNED = 16  # rows of a depth: efficient for kernels, and little padding in seven depths


def _lay_out_evenly(
    slots: Slots,
    deepest_S: Ints,
    shares: Sequence[float],  # [K] largest share of the supervised positions sampled at a depth
    *,
    quantum: int,
    device: torch.device,
) -> ParallelPlan:
    """As `lay_out_parallel` in one segment, with a number of rows of depth 0 that is a multiple of
    `quantum`."""
    supervised_SK, exact = elements_of(slots, deepest_S, len(shares))
    counts = _counts(len(exact.row_key), shares, quantum)
    assert all(rows <= room for rows, room in zip(exact.counts, counts, strict=True))
    axis, plan = lay_out_evenly(
        supervised_SK, exact, counts, spare=1, shared=sum(shares), device=device
    )
    segment, _ = _Segmenter(axis, None, None, device).cut(0, len(axis.slot))
    return ParallelPlan(**vars(plan), segments=(segment,), element_P=None)


def _counts(rows: int, shares: Sequence[float], quantum: int) -> tuple[int, ...]:
    """[K] room for rows, a function of the rounded number of rows of depth 0."""
    most = rounded(rows, quantum)
    room = (int(np.ceil(share * most)) for share in shares[1:])
    return (most, *(min(most, rounded(count, CHAIN_ALIGNED)) for count in room))
