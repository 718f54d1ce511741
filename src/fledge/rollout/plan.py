"""Which elements (anchor, depth) a batch needs, decided once on the host from the masks.

Everything after this file works on flat axes without asking the device for a number again:

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

Slot 0 is not supervised at depths 0 and 1, but its own chain must run through them to reach
depth 2: it is a row there, and no head element.

Not for the arithmetic: attention lives next door, the head in `objective`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.core.rows import TokenBatch
from fledge.core.transfer import send
from fledge.rollout.cod import Bools, Documents, Ints, surviving_depths

BLOCK_ROWS = 256  # query rows that share one block of scores
BLOCK_SCORES = 2**19  # rows x keys of a block, per head: what bounds the memory of long documents
GPU_BLOCKS = 4  # times both, away from the CPU: fewer and larger operations, twice the speed


@dataclass(frozen=True)
class QueryBlock:
    """Rows `order[row_start:row_end]` see no key outside [key_start, key_end)."""

    row_start: int
    row_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True)
class QueryRows:
    """The rows that ask at one depth: where each sits on the key axis, how to walk over them."""

    slot_N: Tensor  # key-axis index of the anchor: the last depth-0 key the row may see
    first_N: Tensor  # key-axis index of the first slot of its document
    order_N: Tensor  # the rows sorted by slot, so that neighbours share keys
    blocks: tuple[QueryBlock, ...]

    def __len__(self) -> int:
        return len(self.slot_N)


@dataclass(frozen=True)
class HeadElements:
    """The supervised (row, depth) pairs, sorted by target slot."""

    element_N: Tensor  # index into all depths' rows laid end to end (depth 0 first)
    depth_N: Tensor
    target_N: Tensor  # index into `RolloutPlan.target_M`, ascending
    target_host: Ints  # the same on the host, to cut chunks without a sync

    def __len__(self) -> int:
        return len(self.target_host)


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    slot_T: Tensor  # position in the flattened [B * T] batch of every slot on the key axis
    span: tuple[int, int] | None  # the key axis is this part of the flattened batch, as it lies
    position_T: Tensor  # rotary position of every slot on the key axis
    every: QueryRows  # all slots as queries: depth 0 of the lower layers of a deep draft
    depths: tuple[QueryRows, ...]
    counts: tuple[int, ...]  # rows per depth
    target_M: Tensor  # flattened position of every slot that holds a target
    head: HeadElements
    supervised_P: Tensor  # bool, over all depths' rows laid end to end
    step_valid_K: Tensor  # int64: slots supervised at all depths <= k
    # bool, only when rollouts were left out: the elements (target, depth) that the rest stands for
    asked_MK: Tensor | None = None

    def by_depth(self, values_P: Tensor) -> tuple[Tensor, ...]:
        """Split per-element values laid end to end into one tensor per depth."""
        return torch.split(values_P, list(self.counts))

    def on_key_axis(self, values_BT: Tensor) -> Tensor:
        """The rows [T, ...] of a batch tensor [B, T, ...] that sit on the key axis."""
        flat = values_BT.flatten(0, 1)
        if self.span is not None:
            return flat[self.span[0] : self.span[1]]
        return flat.index_select(0, self.slot_T)


@dataclass(frozen=True)
class Slots:
    """The batch flattened to one axis of B * T slots, on the host."""

    start: Ints  # first slot of the slot's document
    end: Ints  # one past its last slot, padding included
    real: Bools
    target: Bools  # the slot holds something to predict
    reach: Ints  # depths k < reach stay inside the document
    position: Ints

    @property
    def documents(self) -> Documents:
        """The same as sampling sees it."""
        ordinal: Ints = np.unique(self.start, return_inverse=True)[1].astype(np.int64)
        place = np.arange(len(self.start), dtype=np.int64) - self.start
        return Documents(self.target, ordinal, place)


class RowMasks(NamedTuple):
    """What a plan reads of a batch, on any device; the loss mask shifted."""

    loss_mask: Tensor  # [B, T]
    attention_mask: Tensor
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None

    @classmethod
    def of(cls, rows: TokenBatch, loss_mask: Tensor) -> "RowMasks":
        packing = (rows.position_ids, rows.seq_lens, rows.doc_remaining)
        return cls(loss_mask, rows.attention_mask, *packing)


def plan_rollout(
    masks: RowMasks,
    *,
    num_depths: int,
    compact: bool = True,
    keep: float = 1.0,
    seed: int = 0,
    device: torch.device | None = None,
) -> RolloutPlan:
    """Read the masks (the only host sync of a step) and lay out the rollout on `device`.

    Masks that are still on the host cost no sync at all: plan before the target runs.

    With `compact=False` every real slot is a row as long as its input token exists: the wasteful
    layout that must give the same loss.

    With `keep` < 1 a rollout goes one depth deeper with that chance only, drawn from `seed` and the
    document's own loss mask.
    """
    slots = flatten_slots(masks)
    supervised_SK = _supervised(slots, num_depths)
    device = device or masks.loss_mask.device
    asked_MK = None
    if keep < 1:
        asked_MK = _asked(slots, supervised_SK, device)
        survived_S = surviving_depths(slots.documents, num_depths=num_depths, keep=keep, seed=seed)
        supervised_SK &= np.arange(num_depths) <= survived_S[:, None]
    last_S = _last_depth(slots, supervised_SK, compact=compact)
    axis = key_axis(slots, last_S, num_depths)
    return replace(lay_out(slots, supervised_SK, axis, device=device), asked_MK=asked_MK)


def _asked(slots: Slots, supervised_SK: Bools, device: torch.device) -> Tensor:
    """[M, K]: the target slot is asked for at depth k, by the anchor k slots before it."""
    target = np.flatnonzero(slots.target)
    depth = np.arange(supervised_SK.shape[1])
    anchor_MK = target[:, None] - depth
    asked_MK = supervised_SK[np.maximum(anchor_MK, 0), depth] & (anchor_MK >= 0)
    return send(torch.from_numpy(asked_MK), device)


def flatten_slots(masks: RowMasks) -> Slots:
    loss_mask, attention_mask, *packing = masks
    rows, width = loss_mask.shape
    loss, attend, position, lens, remaining = _to_host(
        [loss_mask != 0, attention_mask != 0, *packing]
    )
    assert loss is not None
    assert attend is not None
    index = np.arange(rows * width, dtype=np.int64)
    real = attend.reshape(-1) != 0
    if alone := lens is None:  # padding in front of a row is a document of its own, without rows
        ahead = np.argmax(real.reshape(rows, width), axis=1) if width else np.zeros(rows, np.int64)
        lens = np.stack([ahead, width - ahead], axis=1)
    start, end = _document_bounds(lens, width)
    reach = end - index
    if remaining is None and not alone:
        count = np.cumsum(real)
        remaining = count[end - 1] - count
    if remaining is not None:
        reach = np.minimum(reach, remaining.reshape(-1))
    place = index - start if position is None else position.reshape(-1)
    if (place - place[start] != index - start)[real].any():
        raise ValueError("position_ids: positions must rise by one inside a document")
    if alone and (place != index - start)[real].any():
        raise ValueError("position_ids: without seq_lens a row's tokens are at 0 .. n - 1")
    target = (loss.reshape(-1) != 0) & real & (reach > 0)
    return Slots(start, end, real, target, reach, place)


def _to_host(tensors: list[Tensor | None]) -> list[Ints | None]:
    """All of them in one copy, so that a batch on the device costs one wait."""
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.detach().reshape(-1).to(torch.int64) for tensor in present]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in present]))
    return [
        None if tensor is None else next(parts).numpy().reshape(tuple(tensor.shape))
        for tensor in tensors
    ]


def _document_bounds(lens: Ints, width: int) -> tuple[Ints, Ints]:
    if (lens < 0).any() or (lens.sum(axis=1) != width).any():
        raise ValueError(
            f"seq_lens: every row must sum to the width {width}, got {lens.sum(axis=1).tolist()}"
        )
    flat = lens.reshape(-1)
    end = np.cumsum(flat)
    return np.repeat(end - flat, flat), np.repeat(end, flat)


def _supervised(slots: Slots, num_depths: int) -> Bools:
    """[slots, depths]: the rollout of slot t has something to predict at depth k."""
    size = len(slots.start)
    supervised = np.zeros((size, num_depths), dtype=np.bool_)
    for k in range(min(num_depths, size)):
        supervised[: size - k, k] = slots.target[k:] & (k < slots.reach[: size - k])
    return supervised


def _last_depth(slots: Slots, supervised_SK: Bools, *, compact: bool) -> Ints:
    """The deepest depth each slot's rollout has to reach, -1 where it need not start."""
    num_depths = supervised_SK.shape[1]
    if compact:
        from_the_back = np.argmax(supervised_SK[:, ::-1], axis=1)
        return np.where(supervised_SK.any(axis=1), num_depths - 1 - from_the_back, -1)
    index = np.arange(len(slots.start), dtype=np.int64)
    real_end = slots.start + _per_document(slots, slots.real.astype(np.int64), np.add)
    return np.where(slots.real, np.minimum(num_depths, real_end - index) - 1, -1)


def _per_document(slots: Slots, values: Ints, reduce: np.ufunc) -> Ints:
    """Reduce a value over each document and hand the result to each of its slots."""
    if len(values) == 0:
        return values
    starts, inverse = np.unique(slots.start, return_inverse=True)
    reduced: Ints = reduce.reduceat(values, starts)[inverse]
    return reduced


class KeyAxis(NamedTuple):
    """The slots that some row attends to, and the rows on them, on the host."""

    slot: Ints  # [T] position in the flattened batch
    first: Ints  # [T] key-axis index of the first slot of the document
    position: Ints  # [T]
    row_slot: Ints  # [N] anchors of depth 0 in the flattened batch, deepest rollouts first
    row_key: Ints  # [N] the same on the key axis
    counts: tuple[int, ...]  # rows per depth


def key_axis(slots: Slots, last_S: Ints, num_depths: int) -> KeyAxis:
    """`last_S`: the deepest depth of each slot's rollout, -1 where none starts."""
    index = np.arange(len(last_S), dtype=np.int64)
    last_anchor = _per_document(slots, np.where(last_S >= 0, index, -1), np.maximum)
    keep = np.flatnonzero(index <= last_anchor)
    if not slots.real[keep].all():
        raise ValueError("attention_mask: padding lies inside a document, not at a row's ends")
    key_of = np.cumsum(index <= last_anchor) - 1  # slot -> key axis
    anchors = np.flatnonzero(last_S >= 0)
    rows = anchors[np.lexsort((anchors, -last_S[anchors]))]
    counts = tuple(int((last_S >= k).sum()) for k in range(num_depths))
    first, position = key_of[slots.start[keep]], slots.position[keep]
    return KeyAxis(keep, first, position, rows, key_of[rows], counts)


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
    arrays += [np.logical_and.accumulate(supervised_SK, axis=1).sum(axis=0)]

    it = iter(to_device(arrays, device))
    slot_T, position_T, first_T, slot_N, first_N = (next(it) for _ in range(5))
    arange_T = torch.arange(len(keep), device=device)
    every_blocks = cut_blocks(np.arange(len(keep), dtype=np.int64), key_first, device)
    depths = tuple(
        QueryRows(
            slot_N[:count],
            first_N[:count],
            next(it),
            cut_blocks(row_key[:count][order], row_first[:count][order], device),
        )
        for count, order in zip(counts, orders, strict=True)
    )
    return RolloutPlan(
        slot_T=slot_T,
        span=_span(keep),
        position_T=position_T,
        every=QueryRows(arange_T, first_T, arange_T, every_blocks),
        depths=depths,
        counts=counts,
        target_M=next(it),
        head=HeadElements(next(it), next(it), next(it), head[2]),
        supervised_P=next(it).bool(),
        step_valid_K=next(it),
    )


def _span(slot: Ints) -> tuple[int, int] | None:
    """(begin, end) when the slots lie side by side."""
    if len(slot) == 0:
        return 0, 0
    begin, end = int(slot[0]), int(slot[-1]) + 1
    return (begin, end) if end - begin == len(slot) else None


def _head_elements(
    slots: Slots, supervised_SK: Bools, rows: Ints, counts: tuple[int, ...]
) -> tuple[Ints, Ints, Ints]:
    """(element, depth, target) of every supervised pair, sorted by target slot."""
    target_of = np.cumsum(slots.target) - 1  # slot -> index among the slots that hold targets
    offsets = np.concatenate([[0], np.cumsum(counts)])
    parts = []
    for k, count in enumerate(counts):
        row = np.flatnonzero(supervised_SK[rows[:count], k])
        parts.append(np.stack([offsets[k] + row, np.full_like(row, k), target_of[rows[row] + k]]))
    element, depth, target = np.concatenate(parts, axis=1)
    order = np.argsort(target, kind="stable")
    return element[order], depth[order], target[order]


def query_rows(slot: Ints, first: Ints, device: torch.device) -> QueryRows:
    """Rows in any order, given by the key-axis index of their anchor and of its document."""
    order = np.argsort(slot, kind="stable")
    slot_N, first_N, order_N = to_device([slot, first, order], device)
    return QueryRows(slot_N, first_N, order_N, cut_blocks(slot[order], first[order], device))


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
    """All index arrays in one copy, each begun on a 128-byte border: a kernel compiled for aligned
    pointers then serves every batch, whatever the lengths before it."""
    border = 16
    starts = np.cumsum([0, *(-(-len(array) // border) * border for array in arrays)])
    flat = np.zeros(starts[-1], dtype=np.int64)
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + len(array)] = array
    moved = send(torch.from_numpy(flat), device)
    return tuple(moved[s : s + len(a)] for s, a in zip(starts, arrays, strict=False))
