"""Which elements (anchor, depth) a batch needs, decided once on the host from the masks.

Everything downstream works on flat axes without another device synchronization:

- the *key axis* T: the slots that some row attends to (of each document, everything up to its last
  anchor; padding and slots after the last anchor are dropped);
- the *rows* N of depth k: the anchors that still have something to predict at depth >= k. Rows are
  ordered by how deep they reach, deepest first, so the rows of depth k are simply the first
  `counts[k]` rows of depth 0: going one depth deeper is a slice, never a copy;
- the *head elements*: (row, depth) pairs that are supervised, ordered by the slot that holds their
  target, so that the target's distribution is derived once per slot and used for every depth.

Example: one document of 6 tokens x0..x5, loss mask on x3, x4 (shifted: slots 2, 3), 3 depths.

    slot t            0    1    2    3    4    5
    holds token       x1   x2   x3   x4   x5   -
    loss mask         0    0    1    1    0    0
    supervised at k   2    1,2  0,1  0              (t + k is slot 2 or 3)
    last depth        2    2    1    0

    key axis  = slots 0..3        rows = 0, 1 (depth 2), 2 (depth 1), 3 (depth 0); counts 4, 3, 2

Slot 0 is not supervised at depths 0 and 1, but its chain must run through them to reach depth 2: it
is a row there, but not a head element.

The arithmetic is elsewhere: attention in `rollout.attention`, the head in `objective`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fledge.core.transfer import send
from fledge.rollout.context import ContextRanks, Share, owners, part_of
from fledge.rollout.slots import (
    Bools,
    Ints,
    KeyAxis,
    RowMasks,
    Slots,
    filled,
    flatten_slots,
    key_axis,
    last_depths,
    pairs_with_targets,
    rounded,
    spread_evenly,
    supervised_pairs,
    supervised_so_far,
    surviving_depths,
    targets_by_group,
)

BLOCK_ROWS = 256  # query rows that share one block of scores
BLOCK_SCORES = 2**19  # rows x keys of a block, per head: bounds the memory of long documents
ELEMENT = 3  # cost of an element in slots, which in a one-layer draft only produce keys and values
GPU_BLOCKS = 4  # factor on both, off the CPU: fewer and larger operations, twice the speed


@dataclass(frozen=True)
class QueryBlock:
    """Rows `order[row_start:row_end]`, which attend to keys in [key_start, key_end) only."""

    row_start: int
    row_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True)
class QueryRows:
    """The query rows of one depth: where each sits on the key axis, and how to walk over them."""

    slot_N: Tensor  # key-axis index of the anchor: the last depth-0 key the row may see
    first_N: Tensor  # key-axis index of the first slot of its document
    order_N: Tensor  # the rows sorted by slot, so that neighbours share keys
    # slot and first in that order, on the host; rows that share a slot may share a lower `first`
    sorted_host: tuple[Ints, Ints] | None = None
    # where `first_N` does not rise with the slots: a lower bound of it that does
    floor_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.slot_N)

    @cached_property
    def bounds(self) -> dict[int, Tensor]:
        """Which rows see a block of keys, by the number of keys: for `attention_triton.py`."""
        return {}

    @cached_property
    def blocks(self) -> tuple[QueryBlock, ...]:
        """The blocks of block-wise attention; fused kernels do not need them."""
        if self.sorted_host is None:
            raise ValueError("sorted_host: needed to cut the rows into blocks")
        return cut_blocks(*self.sorted_host, self.slot_N.device)


@dataclass(frozen=True)
class HeadElements:
    """The supervised (row, depth) pairs, sorted by target slot."""

    element_N: Tensor  # index into all depths' rows laid end to end (depth 0 first)
    depth_N: Tensor
    target_N: Tensor  # index into `RolloutPlan.target_M`, ascending
    target_host: Ints  # the same on the host, to cut chunks without a sync
    real_N: Tensor | None = None  # bool, only when some elements are padding: see `lay_out_evenly`
    # (elements, target slots) per group: elements are sorted by group only and may use any target
    # slot of their group; `target_host` is the first of these. See `lay_out_evenly`
    group: tuple[int, int] = (1, 1)

    def __len__(self) -> int:
        return len(self.target_host)

    def chunks(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of at most `rows` elements, whole groups if they fit, and of the target
        slots that they need. A slot needed by two chunks is in both; within a chunk, all depths
        share it."""
        size, spread = self.group
        rows = max(rows // size * size, min(rows, size))
        for begin in range(0, len(self), rows):
            end = min(begin + rows, len(self))
            first, last = int(self.target_host[begin]), int(self.target_host[end - 1])
            yield slice(begin, end), slice(first, last + spread)


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    slot_T: Tensor  # position in the flattened [B * T] batch of every slot on the key axis
    span: tuple[int, int] | None  # (begin, end) if the key axis is one slice of the flattened batch
    position_T: Tensor  # rotary position of every slot on the key axis
    every: QueryRows  # all slots as queries, for depth 0 in the lower layers of a deep draft
    depths: tuple[QueryRows, ...]
    counts: tuple[int, ...]  # rows per depth
    target_M: Tensor  # flattened position of every slot that holds a target
    head: HeadElements
    supervised_P: Tensor  # bool, over all depths' rows laid end to end
    step_valid_K: Tensor  # int64: slots supervised at all depths <= k
    # bool, only when rollouts were dropped: all (target, depth) pairs, dropped ones included
    asked_MK: Tensor | None = None
    # this rank's part, when ranks share the rows: all but the key axis is restricted to it
    share: Share | None = None

    @property
    def position_L(self) -> Tensor:  # noqa: N802  (its shape)
        """Rotary positions of the slots whose tokens are read: the key axis, or this rank's part
        of it."""
        return self.position_T if self.share is None else self.share.position_L

    def by_depth(self, values_P: Tensor) -> tuple[Tensor, ...]:
        """Split per-element values laid end to end into one tensor per depth."""
        return torch.split(values_P, list(self.counts))

    def answered(self, answer_BTX: Tensor) -> Tensor:
        """The target's answer [S, X] at all slots or, when ranks share the rows, [M, X] at the
        target slots of this rank."""
        answer_SX = answer_BTX.flatten(0, 1)
        return answer_SX if self.share is None else answer_SX.index_select(0, self.target_M)

    @property
    def answered_M(self) -> Tensor:  # noqa: N802  (its shape)
        """Index of each target slot in what `answered` returns."""
        if self.share is None:
            return self.target_M
        return torch.arange(len(self.target_M), device=self.target_M.device)

    def on_key_axis(self, values_BT: Tensor) -> Tensor:
        """The rows [T, ...] of a batch tensor [B, T, ...] that sit on the key axis."""
        flat = values_BT.flatten(0, 1)
        if self.span is not None:
            return flat[self.span[0] : self.span[1]]
        return flat.index_select(0, self.slot_T)


def plan_rollout(
    masks: RowMasks,
    *,
    num_depths: int,
    keep: float = 1.0,
    seed: int = 0,
    device: torch.device | None = None,
    ranks: ContextRanks | None = None,
    quantum: int = 0,
) -> RolloutPlan:
    """Read the masks (the only host sync of a step, and none if they are on the host) and lay out
    the rollout on `device`.

    With `keep` < 1 a rollout continues to the next depth with that probability only, drawn from
    `seed` and the document's own loss mask. With `ranks`, which all read the same rows, the plan is
    this rank's part. With `quantum`, sizes are rounded up so that the same few recur
    (`lay_out_evenly`).
    """
    slots = flatten_slots(masks)
    asked_SK = supervised_SK = supervised_pairs(slots, num_depths)
    device = device or masks.loss_mask.device
    if keep < 1:
        survived_S = surviving_depths(slots.documents, num_depths=num_depths, keep=keep, seed=seed)
        supervised_SK = asked_SK & (np.arange(num_depths) <= survived_S[:, None])
    axis = key_axis(slots, last_depths(supervised_SK), num_depths)
    if quantum:
        targets = np.flatnonzero(slots.target)
        size = rounded(max(len(axis.row_key) + 1, len(targets)), quantum)  # with a padding row
        _, plan = lay_out_evenly(
            supervised_SK, axis, (size,) * num_depths, spare=num_depths, targets=targets,
            device=device,
        )  # fmt: skip
        return plan
    if ranks is None:
        plan = lay_out(slots, supervised_SK, axis, device=device)
    else:
        owner = owners(axis, ranks.size, element=ELEMENT)
        part = part_of(slots, asked_SK, axis, owner, ranks.rank)
        slots, asked_SK = part.slots, asked_SK & part.mine[:, None]
        plan = lay_out(slots, supervised_SK & part.mine[:, None], part.axis, device=device)
        every = query_rows(part.own, axis.first[part.own], device)
        plan = replace(plan, every=every, share=part.share(ranks, device, depths=num_depths))
    if keep < 1:
        # a target slot is asked for at depth k by the anchor that is k slots before it
        anchor_MK = np.flatnonzero(slots.target)[:, None] - np.arange(num_depths)
        asked_MK = asked_SK[np.maximum(anchor_MK, 0), range(num_depths)] & (anchor_MK >= 0)
        return replace(plan, asked_MK=send(torch.from_numpy(asked_MK), device))
    return plan


def lay_out(
    slots: Slots, supervised_SK: Bools, axis: KeyAxis, *, device: torch.device
) -> RolloutPlan:
    keep, key_first, _, rows, row_key, counts = axis
    row_first = key_first[row_key]
    orders = [np.argsort(row_key[:count], kind="stable") for count in counts]
    head = _head_elements(slots, supervised_SK, rows, counts)
    supervised_P = np.concatenate([supervised_SK[rows[:n], k] for k, n in enumerate(counts)])
    arrays = [keep, axis.position, key_first, row_key, row_first, *orders]
    arrays += [np.flatnonzero(slots.target), *head, supervised_P.astype(np.int64)]
    arrays += [supervised_so_far(supervised_SK)]

    begin = int(keep[0]) if len(keep) else 0
    contiguous = len(keep) == 0 or int(keep[-1]) - begin == len(keep) - 1
    moved = iter(to_device(arrays, device))
    slot_T, position_T, first_T, slot_N, first_N = (next(moved) for _ in range(5))
    depths = tuple(
        QueryRows(slot_N[:count], first_N[:count], next(moved), (row_key[order], row_first[order]))
        for count, order in zip(counts, orders, strict=True)
    )
    return RolloutPlan(
        slot_T=slot_T,
        span=(begin, begin + len(keep)) if contiguous else None,
        position_T=position_T,
        every=every_slot(first_T, key_first),
        depths=depths,
        counts=counts,
        target_M=next(moved),
        head=HeadElements(next(moved), next(moved), next(moved), head[2]),
        supervised_P=next(moved).bool(),
        step_valid_K=next(moved),
    )


def _head_elements(
    slots: Slots, supervised_SK: Bools, rows: Ints, counts: tuple[int, ...]
) -> tuple[Ints, Ints, Ints]:
    """(element, depth, target) of every supervised pair, sorted by target slot."""
    target_of = np.cumsum(slots.target) - 1  # slot -> index among the slots that hold targets
    offsets, parts = np.cumsum((0, *counts)), []
    for k, count in enumerate(counts):
        row = np.flatnonzero(supervised_SK[rows[:count], k])
        parts.append(np.stack([offsets[k] + row, np.full_like(row, k), target_of[rows[row] + k]]))
    element, depth, target = np.concatenate(parts, axis=1)
    order = np.argsort(target, kind="stable")
    return element[order], depth[order], target[order]


def query_rows(slot: Ints, first: Ints, device: torch.device) -> QueryRows:
    """Rows in any order, given by the key-axis indices of their anchors and of the first slots of
    their documents."""
    order = np.argsort(slot, kind="stable")
    slot_N, first_N, order_N = to_device([slot, first, order], device)
    return QueryRows(slot_N, first_N, order_N, (slot[order], first[order]))


def every_slot(first_T: Tensor, first: Ints) -> QueryRows:
    """All slots of the key axis as rows, on the device and on the host."""
    slot_T = torch.arange(len(first), device=first_T.device)
    return QueryRows(slot_T, first_T, slot_T, (np.arange(len(first)), first))


def cut_blocks(slot: Ints, first: Ints, device: torch.device) -> tuple[QueryBlock, ...]:
    """Cut rows sorted by slot into blocks of bounded size, at document ends where that is cheap."""
    scale = 1 if device.type == "cpu" else GPU_BLOCKS
    blocks = []
    begin = 0
    while begin < len(slot):
        stop = min(begin + scale * BLOCK_ROWS, len(slot))
        area = np.arange(1, stop - begin + 1) * (slot[begin:stop] + 1 - first[begin])
        end = begin + max(1, int(np.searchsorted(area, scale * BLOCK_SCORES, side="right")))
        if end < len(slot):
            changes = np.flatnonzero(first[begin + 1 : end + 1] != first[begin:end]) + 1
            if len(changes) and changes[-1] >= (end - begin) // 2:
                end = begin + int(changes[-1])
        blocks.append(QueryBlock(begin, end, int(first[begin]), int(slot[end - 1]) + 1))
        begin = end
    return tuple(blocks)


def to_device(arrays: list[Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Copy all index arrays to the device at once, each aligned to 128 bytes: a kernel compiled for
    aligned pointers then serves every batch, whatever the lengths of the arrays."""
    alignment = 16
    starts = np.cumsum([0, *(-(-len(array) // alignment) * alignment for array in arrays)])
    flat = np.zeros(starts[-1], dtype=np.int64)
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + len(array)] = array
    moved = send(torch.from_numpy(flat), device)
    return tuple(moved[s : s + len(a)] for s, a in zip(starts, arrays, strict=False))


# --- padded plans ---------------------------------------------------------------------------------
# The same rollout laid out in rounded sizes, so that shapes recur from batch to batch.
#
# The kernels that a step launches depend on the sizes of its plan only. These take few values if
# the key axis is always as long as the batch, and the numbers of rows are rounded up to a multiple
# of some quantum: a step of each size can then be recorded once and replayed with one call.
#
# Padding changes no number that is read. A padding slot is a document of its own, and padding rows
# sit on the first one; rows may be followed further than they are supervised, into meaningless
# tokens. The head's elements are all rows of all depths: the real ones sorted by the slot that they
# ask for, the others spread evenly between them (see `real_N`).
#
# Where an element finds its target must not depend on the batch. Where all rows go to the last
# depth (EAGLE-3), the elements are all pairs of a target slot and a depth instead; those that no
# row asks for refer to a padding row. One slot per element adds no work where the loss reads the
# text only, but where it reads the target's distributions, each of which is a row of logits, there
# would be several times as many as needed. So groups of adjacent elements have their own target
# slots, every group as many as the one that needs most: a sixteenth more than an average group
# could need or, in packs of very short answers, half as much again, and so on.
#
# Example: groups of 6 elements, which ask for the slots 4, 4, 5, 5, 5, 6 | 7, 7, 8, 8, 9, 9.
#
#     target slots    4  5  6  .      7  8  9  .       4 for each group
#     target_N        0  0  1  1  1  2      4  4  5  5  6  6

ALIGNED = 64  # slots: efficient for matrix products
GROUP = 2048  # elements that share target slots: smaller groups differ more
ROOM = 17 / 16  # room for target slots, relative to the need of a group in long documents


def lay_out_evenly(
    supervised_SK: Bools,
    exact: KeyAxis,
    counts: tuple[int, ...],  # room for rows at each depth
    *,
    spare: int,
    targets: Ints | None = None,
    shared: float | None = None,
    device: torch.device,
) -> tuple[KeyAxis, RolloutPlan]:
    """As `lay_out`, with this many rows; also returns the padded axis. `spare`: padding slots, as
    many as a padding row reads. `targets`: the slots that hold targets, where all rows go to the
    last depth. Else `shared`: elements that usually ask for one slot, None if each has a slot of
    its own."""
    size_T, rows = rounded(len(supervised_SK) + spare, ALIGNED), len(exact.row_key)
    axis = exact._replace(
        slot=filled(exact.slot, size_T, 0),
        first=np.concatenate([exact.first, np.arange(len(exact.slot), size_T)]),
        position=filled(exact.position, size_T, 0),
        row_slot=filled(exact.row_slot, counts[0], 0),
        row_key=filled(exact.row_key, counts[0], len(exact.slot)),
        counts=counts,
    )
    depths = list(enumerate(counts))
    asked_P = np.concatenate([axis.row_slot[:n] + depth for depth, n in depths])
    real_P = np.concatenate(
        [supervised_SK[axis.row_slot[:n], depth] & (np.arange(n) < rows) for depth, n in depths]
    )
    if targets is not None:
        element, real = pairs_with_targets(supervised_SK, axis, targets)
        group, spread, target = len(counts), 1, filled(targets, counts[0], 0)
        target_X = np.arange(len(element)) // group
    else:
        element, real = spread_evenly(asked_P, real_P)
        group, step = 1, 1
        if shared is not None:
            group = -(-len(element) // -(-len(element) // GROUP))  # all of equal size
            step = int(np.ceil(ROOM * group / shared / 2))  # the usual room is two of these
        target, target_X, spread = targets_by_group(asked_P[element], real, group, step=step)
    depth_P, row_first = np.repeat(np.arange(len(counts)), counts), axis.first[axis.row_key]
    order = np.argsort(axis.row_key, kind="stable")
    arrays = [axis.slot, axis.position, axis.first, axis.row_key, row_first, order, target]
    arrays += [element, depth_P[element], target_X, real.astype(np.int64)]
    arrays += [real_P.astype(np.int64), supervised_so_far(supervised_SK)]
    (
        slot_T, position_T, first_T, slot_N, first_N, order_N, target_M,
        element_X, depth_X, target_of_X, real_X, supervised_P, step_valid_K,
    ) = to_device(arrays, device)  # fmt: skip
    queries = QueryRows(slot_N, first_N, order_N, (axis.row_key[order], row_first[order]))
    lowest = np.arange(len(element)) // group * spread
    return axis, RolloutPlan(
        slot_T=slot_T,
        span=None,
        position_T=position_T,
        every=every_slot(first_T, axis.first),
        depths=(queries,) * len(counts),
        counts=counts,
        target_M=target_M,
        head=HeadElements(element_X, depth_X, target_of_X, lowest, real_X.bool(), (group, spread)),
        supervised_P=supervised_P.bool(),
        step_valid_K=step_valid_K,
    )
