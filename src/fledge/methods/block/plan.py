"""The plan of a batch of blocks (DFlash, DSpark): where blocks start, and what they predict.

Slots are those of `plan.py`: slot t holds the target's features of token t, and reads token t + 1.
A block that starts at slot t has token t + 1 as its first, the *newest*, so that "all features
strictly before the newest token" are the slots of its document up to t: the same prefix as for any
other rollout. Depth k of the rollout predicts token t + k + 2. A slot may be asked for when the
token that it predicts, t + 2, is in the document and supervised, and a block may start there when
token t + 1 is supervised too.

Example: seven tokens, the answer is x3 .. x6, blocks of 4 that propose 3 tokens.

    slot t              0   1   2   3   4   5   6
    reads token         x1  x2  x3  x4  x5  x6  .
    predicts            x2  x3  x4  x5  x6  .   .
    may be asked for    .   yes yes yes yes .   .
    may start a block   .   .   yes yes yes .   .      newest token x3, x4 or x5
    block from slot 3   context x0 .. x3, [x4, MASK, MASK, MASK] at positions 4 .. 7: x5, x6, -

Blocks are drawn for each document separately, from the seed and the document's own loss mask:
`anchors` per 2,048 tokens, in proportion. Padding, packing, ranks and micro-batches do not change
what is drawn.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fledge.core.transfer import send
from fledge.rollout import plan as rollout_plan
from fledge.rollout.plan import QueryRows, RolloutPlan, lay_out, to_device
from fledge.rollout.slots import (
    Bools,
    Ints,
    RowMasks,
    Slots,
    flatten_slots,
    key_axis,
    last_depths,
    rank_in_group,
    rounded,
    slot_words,
    slots_asked_for,
    supervised_pairs,
)

SHARED = 4  # elements that ask for one target slot in typical blocks
ANCHOR_TOKENS = 2048  # `anchors` is the number of blocks per this many tokens of a document


@dataclass(frozen=True)
class BlockRows:
    """Where blocks start, in key-axis order; each has `size` queries."""

    slot_N: Tensor  # key-axis index of the last slot that a block sees
    first_N: Tensor  # key-axis index of the first slot of its document
    size: int
    # the same on the host, to walk over blocks of scores; fused kernels do not need it
    ends_host: tuple[Ints, Ints] | None = None

    def __len__(self) -> int:
        return len(self.slot_N)

    @classmethod
    def of(cls, slot: Ints, first: Ints, size: int, device: torch.device) -> "BlockRows":
        slot_N, first_N = to_device([slot, first], device)
        return cls(slot_N, first_N, size, (slot, first))

    @cached_property
    def _flat(self) -> dict[int | None, QueryRows]:
        return {}

    def flat(self, window: int | None) -> QueryRows:
        """Every query as a separate row. A window means a later first key: the query at place j is
        j + 1 places after the last key, and sees less than `window` places back."""
        if window not in self._flat:
            place_J = torch.arange(self.size, device=self.slot_N.device)
            slot_NJ = self.slot_N[:, None].expand(-1, self.size)
            first_NJ = self.first_N[:, None].expand(-1, self.size)
            floor_M = None
            if window is not None:
                first_NJ = torch.maximum(first_NJ, slot_NJ + 2 + place_J - window)
                # the first query of a block sees furthest back
                floor_M = first_NJ[:, :1].expand(-1, self.size).reshape(-1)
            order_M = torch.arange(slot_NJ.numel(), device=place_J.device)
            flat = (slot_NJ.reshape(-1), first_NJ.reshape(-1), order_M)
            self._flat[window] = QueryRows(*flat, self._sorted_host(window), floor_M)
        return self._flat[window]

    @cached_property
    def _inside(self) -> dict[tuple[bool, int | None], QueryRows]:
        return {}

    def inside(self, *, causal: bool, window: int | None) -> QueryRows:
        """Every query as a row over the keys of all blocks end to end: it sees those of its own
        block or, if `causal`, those up to its own."""
        if (causal, window) not in self._inside:
            query_M = torch.arange(len(self) * self.size, device=self.slot_N.device)
            first_M = query_M // self.size * self.size
            last_M = query_M if causal else first_M + self.size - 1
            if window is not None:
                first_M = torch.maximum(first_M, query_M - window + 1)
            self._inside[causal, window] = QueryRows(last_M, first_M, query_M)
        return self._inside[causal, window]

    def _sorted_host(self, window: int | None) -> tuple[Ints, Ints] | None:
        if self.ends_host is None:
            return None
        slot, lowest = self.ends_host
        if window is not None:
            lowest = np.maximum(lowest, slot + 2 - window)
        return np.repeat(slot, self.size), np.repeat(lowest, self.size)

    def part(self, begin: int, end: int) -> "BlockRows":
        """The blocks from `begin` to `end`."""
        cut, ends = slice(begin, end), self.ends_host
        ends = None if ends is None else (ends[0][cut], ends[1][cut])
        return BlockRows(self.slot_N[cut], self.first_N[cut], self.size, ends)


@dataclass(frozen=True, kw_only=True)
class BlockPlan(RolloutPlan):
    blocks: BlockRows
    element_P: Tensor  # index of each element among the queries of all blocks end to end


def plan_blocks(
    masks: RowMasks,
    *,
    place: tuple[int, int],  # size of a block, and the query that predicts depth 0
    anchors: int,
    seed: int,
    contiguous: bool = False,  # a block predicts nothing beyond an unsupervised token
    device: torch.device | None = None,
    quantum: int = 0,
    share_targets: bool = True,
) -> BlockPlan:
    """Draw the blocks of a batch and lay them out; one host sync, as in `plan_rollout`.

    With `quantum`, sizes are rounded up so that the same few recur (`lay_out_evenly`); then
    `share_targets` suits a loss that reads the target's distributions.
    """
    slots = flatten_slots(masks)
    asked_S = asked_slots(slots)
    chosen_S = draw_anchors(slots, slots.target & asked_S, anchors=anchors, seed=seed)
    device = device or masks.loss_mask.device
    supervised_SK = supervised_blocks(
        slots, asked_S, chosen_S, place[0] - place[1], contiguous=contiguous
    )
    if not quantum:
        return lay_out_blocks(slots, supervised_SK, place, device=device)
    return lay_out_evenly(
        slots, supervised_SK, place, quantum=quantum, share=share_targets, device=device
    )


def asked_slots(slots: Slots) -> Bools:
    """[S]: whether the token after the one that is read is in the same document and supervised."""
    asked = np.zeros_like(slots.target)
    asked[:-1] = slots.target[1:] & (slots.start[1:] == slots.start[:-1]) & slots.real[:-1]
    return asked


def draw_anchors(slots: Slots, candidate_S: Bools, *, anchors: int, seed: int) -> Bools:
    """[S] bool: of each document's candidates, `anchors` per 2,048 of its tokens, rounded up."""
    documents = slots.documents
    tokens = np.bincount(documents.ordinal[slots.real], minlength=documents.ordinal[-1] + 1)
    wanted = -(-anchors * tokens // ANCHOR_TOKENS)
    pool = np.flatnonzero(candidate_S)
    owner = documents.ordinal[pool]
    rank = rank_in_group(owner, slot_words(documents, seed)[pool])
    chosen = np.zeros_like(candidate_S)
    chosen[pool[rank < wanted[owner]]] = True
    return chosen


def supervised_blocks(
    slots: Slots, asked_S: Bools, chosen_S: Bools, num_depths: int, *, contiguous: bool
) -> Bools:
    """[S, K]: whether a block starts here and predicts the token at this depth."""
    pairs_SK = supervised_pairs(replace(slots, target=asked_S), num_depths) & chosen_S[:, None]
    return np.logical_and.accumulate(pairs_SK, axis=1) if contiguous else pairs_SK


def lay_out_blocks(
    slots: Slots,
    supervised_SK: Bools,
    place: tuple[int, int],  # size of a block, and the query that predicts depth 0
    *,
    device: torch.device,
) -> BlockPlan:
    """The plan of a given draw."""
    axis = key_axis(slots, last_depths(supervised_SK), supervised_SK.shape[1])
    asked = replace(slots, target=slots_asked_for(supervised_SK))
    plan = lay_out(asked, supervised_SK, axis, device=device)
    order = np.argsort(axis.row_key, kind="stable")
    size, first_place = place
    row_block = np.empty_like(order)  # row of depth 0 -> block
    row_block[order] = np.arange(len(order))
    element = [row_block[:n] * size + first_place + k for k, n in enumerate(axis.counts)]
    element_P = send(torch.from_numpy(np.concatenate(element)), device)
    key = axis.row_key[order]
    blocks = BlockRows.of(key, axis.first[key], size, device)
    return BlockPlan(**vars(plan), blocks=blocks, element_P=element_P)


def lay_out_evenly(
    slots: Slots,
    supervised_SK: Bools,
    place: tuple[int, int],  # size of a block, and the query that predicts depth 0
    *,
    quantum: int,
    share: bool,  # whether blocks share target slots: if the loss reads the target's distributions
    device: torch.device,
) -> BlockPlan:
    """As `lay_out_blocks` in rounded sizes (see `rollout/plan.py`), with a number of blocks that is
    a multiple of `quantum`. Padding blocks sit on a padding slot."""
    depths = supervised_SK.shape[1]
    axis = key_axis(slots, last_depths(supervised_SK), depths)
    axis = axis._replace(row_slot=np.sort(axis.row_slot), row_key=np.sort(axis.row_key))
    size_N = rounded(len(axis.row_key), quantum)
    shared = SHARED if share else None
    padded, plan = rollout_plan.lay_out_evenly(
        supervised_SK, axis, (size_N,) * depths, spare=1, shared=shared, device=device
    )
    query_KN = np.arange(size_N) * place[0] + place[1] + np.arange(depths)[:, None]
    element_P = send(torch.from_numpy(query_KN.reshape(-1)), device)
    rows, ends = plan.depths[0], (padded.row_key, padded.first[padded.row_key])
    blocks = BlockRows(rows.slot_N, rows.first_N, place[0], ends)
    return BlockPlan(**vars(plan), blocks=blocks, element_P=element_P)
