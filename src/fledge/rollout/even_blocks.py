"""Blocks laid out in rounded sizes, so that a step of each size can be recorded: see `even.py`.

The key axis is as long as the batch. The number of blocks is rounded up to a multiple of some
quantum; padding blocks sit on a padding slot, a document of its own. The head's elements are all
pairs of a block and a depth, block by block; those that are not supervised run as they are, but do
not count in the loss (`HeadElements.real_N`).

Where an element finds its target must not depend on the batch. The grid of `even.py`, all pairs of
a target slot and a depth, would make the head's work two to three times as much: with SmolLM2's
recipes, 16,384 tokens start 4,096 blocks of 7 depths, 28,672 elements, which ask for 10,000 to
13,000 slots. One slot per element adds no work where the loss reads the text only. Where it reads
the target's distributions, each of which is a row of logits, there would be three times as many as
needed. So in that case groups of adjacent blocks have their own target slots, every group as many
as the one that needs most, in eighths of what it could need: in packed chats 0.37 to 0.51 of the
number of elements, where 0.34 are needed.

Example: groups of 2 blocks of 3 depths, which start at slots 4, 5 | 7, 20.

    block           4          5          7          20
    asks for        4  5  6    5  6  7    7  8  9    20 21 22
    target slots    4  5  6  7  .  .      7  8  9  20 21 22       6 for each group
    target_N        0  1  2    1  2  3    6  7  8    9  10 11
"""

import numpy as np
import torch

from fledge.rollout.block_plan import BlockPlan, BlockRows, axis_of_blocks
from fledge.rollout.cod import Bools, Ints
from fledge.rollout.even import ALIGNED, filled, rounded
from fledge.rollout.plan import HeadElements, QueryRows, supervised_so_far, to_device
from fledge.rollout.slots import Slots

# blocks that share target slots: smaller groups differ more; a chunk of the head holds several
GROUP = 128
SHARES = 8  # number of sizes that a group may have


def lay_out_evenly(
    slots: Slots,
    supervised_SK: Bools,
    place: tuple[int, int],  # size of a block, and the query that predicts depth 0
    *,
    quantum: int,
    share: bool,  # whether blocks share target slots: if the loss reads the target's distributions
    device: torch.device,
) -> BlockPlan:
    """As `block_plan.lay_out_blocks`, with a number of blocks that is a multiple of `quantum`."""
    axis, depths = axis_of_blocks(slots, supervised_SK), supervised_SK.shape[1]
    size_T = rounded(len(slots.target) + 1, ALIGNED)  # with a padding slot
    size_N = rounded(len(axis.row_key), quantum)
    first = np.concatenate([axis.first, np.arange(len(axis.slot), size_T)])
    key, begins = filled(np.sort(axis.row_key), size_N, len(axis.slot)), np.sort(axis.row_slot)
    real_NK = np.zeros((size_N, depths), dtype=np.bool_)
    real_NK[: len(begins)] = supervised_SK[begins]
    asked_NK = filled(begins, size_N, 0)[:, None] + np.arange(depths)
    group = GROUP if share else 1
    target, target_NK, spread = targets_by_group(
        asked_NK, real_NK, group, step=depths * max(1, group // SHARES)
    )
    element_NK = np.arange(size_N)[:, None] + np.arange(depths) * size_N
    depth_NK = np.broadcast_to(np.arange(depths), element_NK.shape)
    query_NK = np.arange(size_N)[:, None] * place[0] + place[1] + np.arange(depths)
    real = real_NK.astype(np.int64)
    arrays = [
        *(filled(axis.slot, size_T, 0), filled(axis.position, size_T, 0), first),
        *(key, first[key], target),
        *(pairs.reshape(-1) for pairs in (element_NK, depth_NK, target_NK, real)),
        *(real.T.reshape(-1), supervised_so_far(supervised_SK), query_NK.T.reshape(-1)),
    ]
    (
        slot_T, position_T, first_T, slot_N, first_N, target_M, element_X, depth_X, target_X,
        real_X, supervised_P, step_valid_K, element_P,
    ) = to_device(arrays, device)  # fmt: skip
    arange_T, arange_N = (torch.arange(count, device=device) for count in (size_T, size_N))
    ends = (key, first[key])
    lowest = np.repeat(np.arange(size_N) // group * spread, depths)
    return BlockPlan(
        slot_T=slot_T,
        span=None,
        position_T=position_T,
        every=QueryRows(arange_T, first_T, arange_T, (np.arange(size_T), first)),
        depths=(QueryRows(slot_N, first_N, arange_N, ends),) * depths,
        counts=(size_N,) * depths,
        target_M=target_M,
        head=HeadElements(
            element_X, depth_X, target_X, lowest, real_X.bool(), (group * depths, spread)
        ),
        supervised_P=supervised_P.bool(),
        step_valid_K=step_valid_K,
        blocks=BlockRows(slot_N, first_N, place[0], ends),
        element_P=element_P,
    )


def targets_by_group(
    asked_NK: Ints, real_NK: Bools, group: int, *, step: int
) -> tuple[Ints, Ints, int]:
    """The target slots of all groups end to end, each pair's index among them (any of its group if
    it is not real), and the number of slots per group, a multiple of `step`."""
    blocks = len(asked_NK)
    group_N1 = np.arange(blocks)[:, None] // group
    width = asked_NK.max() + 1
    unique, inverse = np.unique((group_N1 * width + asked_NK)[real_NK], return_inverse=True)
    owner, slot = np.divmod(unique, width)
    rank = np.arange(len(unique)) - np.searchsorted(owner, owner)
    spread = rounded(int(rank.max(initial=-1)) + 1, step)
    target = np.zeros(-(-blocks // group) * spread, dtype=np.int64)
    target[owner * spread + rank] = slot
    target_NK = np.broadcast_to(group_N1 * spread, asked_NK.shape).copy()
    target_NK[real_NK] = (owner * spread + rank)[inverse]
    return target, target_NK, spread
