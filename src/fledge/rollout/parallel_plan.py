"""The plan of a P-EAGLE batch: a rollout plan whose depths run at once, segment by segment.

All depths of a segment form one flat axis Q: the segment's depth-0 slots, then the *chain rows*,
depth 1, depth 2, ... end to end. Chain rows keep the order of `plan.py` (deepest rollouts first):
the rows of depth d are the first `counts[d - 1]` of depth 1, row i of every depth is one rollout.

With one segment that is the whole batch. With S segments (the paper's Algorithm 1), a depth-0 slot
belongs to the segment of its position and a chain row to that of its anchor + 1; keys of earlier
segments are handed on, so the result is the same and only one segment's activations are alive.

Example: slots 0..5, rollouts from anchor 1 (to depth 2) and anchor 2 (to depth 1), two segments of
slots 0..2 and 3..5.

    segment 0   Q = slot 0, slot 1, slot 2, (1, 1), (1, 2)     counts 1, 1
    segment 1   Q = slot 3, slot 4, slot 5, (2, 1)             counts 1, 0
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from fledge.core.transfer import send
from fledge.rollout.cod import Ints, sample_depths
from fledge.rollout.plan import (
    KeyAxis,
    QueryRows,
    RolloutPlan,
    RowMasks,
    Slots,
    flatten_slots,
    key_axis,
    lay_out,
    query_rows,
    to_device,
)


@dataclass(frozen=True)
class Segment:
    begin: int  # its depth-0 slots are [begin, end) of the key axis
    end: int
    counts: tuple[int, ...]  # chain rows at depths 1, 2, ...
    chain_position_M: Tensor  # rotary positions of the chain rows: anchor's + depth
    every: QueryRows  # its slots and chain rows, as they ask in all layers but the last
    anchor_N: Tensor  # the slots that ask in the last layer, counted from `begin`
    asking: QueryRows  # these and the chain rows


@dataclass(frozen=True, kw_only=True)
class ParallelPlan(RolloutPlan):
    segments: tuple[Segment, ...]
    element_P: Tensor | None  # where each element lies in the segments' rows; None: as they come

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
    max_anchors: int | None = None,
    partitions: int = 1,
    device: torch.device | None = None,
) -> ParallelPlan:
    """Sample the rollouts of a batch and lay them out; one host sync, as `plan_rollout`."""
    slots = flatten_slots(masks)
    deepest_S = sample_depths(
        slots.documents,
        num_depths=num_depths,
        ratio=ratio,
        ratio_min=ratio_min,
        seed=seed,
        row=np.arange(len(slots.start)) // max(1, masks.loss_mask.shape[1]),
        max_anchors=max_anchors,
    )
    device = device or masks.loss_mask.device
    return lay_out_parallel(slots, deepest_S, num_depths, partitions=partitions, device=device)


def lay_out_parallel(
    slots: Slots, deepest_S: Ints, num_depths: int, *, partitions: int = 1, device: torch.device
) -> ParallelPlan:
    """The plan of a given draw: the deepest depth of each slot's rollout."""
    supervised_SK = np.zeros((len(deepest_S), num_depths), dtype=np.bool_)
    supervised_SK[:, 0] = slots.target
    supervised_SK[:, 1:] = deepest_S[:, None] >= np.arange(1, num_depths)
    last_S = np.where(supervised_SK.any(axis=1), deepest_S, -1)
    axis = key_axis(slots, last_S, num_depths)
    plan = lay_out(slots, supervised_SK, axis, device=device)
    segments, element_P = _cut(axis, partitions, device)
    shared = {field.name: getattr(plan, field.name) for field in fields(RolloutPlan)}
    return ParallelPlan(**shared, segments=segments, element_P=element_P)


def _cut(
    axis: KeyAxis, partitions: int, device: torch.device
) -> tuple[tuple[Segment, ...], Tensor | None]:
    """The segments, and where their rows put each element."""
    chain_home = np.minimum(axis.row_key + 1, len(axis.slot) - 1)  # the slot that decides
    ends = _boundaries(axis, chain_home, partitions)
    segments, elements, begin = [], [], 0
    for end in ends:
        segment, element = _segment(axis, begin, end, chain_home, device)
        segments.append(segment)
        elements.append(element)
        begin = end
    if len(segments) == 1:
        return tuple(segments), None
    lies_at = np.argsort(np.concatenate(elements))
    return tuple(segments), send(torch.from_numpy(lies_at), device)


def _boundaries(axis: KeyAxis, chain_home: Ints, partitions: int) -> list[int]:
    """Ends of the segments on the key axis: as equal in rows as whole positions allow."""
    size = len(axis.slot)
    load = np.ones(size, dtype=np.int64)
    for count in axis.counts[1:]:
        load += np.bincount(chain_home[:count], minlength=size)
    shares = np.arange(1, partitions + 1) * load.sum() / partitions
    ends = np.searchsorted(np.cumsum(load), shares - 0.5) + 1
    return [int(end) for end in np.unique(np.minimum(ends, size))] if size else [0]


def _segment(
    axis: KeyAxis, begin: int, end: int, chain_home: Ints, device: torch.device
) -> tuple[Segment, Ints]:
    """One segment, and the element (all depths' rows end to end) of each last-layer row."""
    anchors = np.flatnonzero((axis.row_key >= begin) & (axis.row_key < end))
    chains = np.flatnonzero((chain_home >= begin) & (chain_home < end))
    offsets = np.cumsum((0, *axis.counts))
    rows = [chains[chains < count] for count in axis.counts[1:]]
    elements = [anchors, *(offsets[depth] + row for depth, row in enumerate(rows, start=1))]
    chain = axis.row_key[np.concatenate([anchors[:0], *rows])]
    counts = tuple(len(row) for row in rows)
    depth = np.repeat(np.arange(1, len(rows) + 1), np.array(counts, dtype=np.int64))
    every = np.concatenate([np.arange(begin, end), chain])
    asking = np.concatenate([axis.row_key[anchors], chain])
    position_M, anchor_N = to_device(
        [axis.position[chain] + depth, axis.row_key[anchors] - begin], device
    )
    segment = Segment(
        begin=begin,
        end=end,
        counts=counts,
        chain_position_M=position_M,
        every=query_rows(every, axis.first[every], device),
        anchor_N=anchor_N,
        asking=query_rows(asking, axis.first[asking], device),
    )
    return segment, np.concatenate(elements)
