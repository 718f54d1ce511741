"""The same rollout laid out in rounded sizes, so that shapes recur from batch to batch.

The kernels that a step launches depend on the sizes of its plan only. These take few values if the
key axis is always as long as the batch, and the numbers of rows and of target slots are equal and
rounded up to a multiple of some quantum: a step of each size can then be recorded once and replayed
with one call.

Padding changes no number that is read. A padding slot is a document of its own, and a padding row
sits on one; every row is followed to the last depth, past its own end into meaningless tokens; the
head's elements are all pairs of a target slot and a depth, including those that are not supervised
(see `real_N`), which refer to a padding row and do not count in the loss.
"""

import numpy as np
import torch

from fledge.rollout.cod import Bools, Ints
from fledge.rollout.plan import HeadElements, QueryRows, RolloutPlan, supervised_so_far, to_device
from fledge.rollout.slots import KeyAxis, Slots

ALIGNED = 64  # efficient for matrix products


def lay_out_evenly(
    slots: Slots, supervised_SK: Bools, axis: KeyAxis, *, quantum: int, device: torch.device
) -> RolloutPlan:
    """As `plan.lay_out`, with numbers of rows and of target slots that are multiples of
    `quantum`."""
    depths = supervised_SK.shape[1]
    target = np.flatnonzero(slots.target)
    # room for `depths` padding slots, which a padding row reads from, and for one padding row
    size_T = rounded(len(slots.target) + depths, ALIGNED)
    size_N = size_M = rounded(max(len(axis.row_key) + 1, len(target)), quantum)
    padding = np.arange(len(axis.slot), size_T)
    first = np.concatenate([axis.first, padding])
    row_key = filled(axis.row_key, size_N, padding[0])
    order = np.argsort(row_key, kind="stable")
    element_MK, real_MK = _grid(supervised_SK, axis.row_slot, target, (size_M, size_N))
    supervised_KN = np.zeros((depths, size_N), dtype=np.int64)
    supervised_KN[:, : len(axis.row_slot)] = supervised_SK[axis.row_slot].T
    depth_MK = np.broadcast_to(np.arange(depths), (size_M, depths))
    target_MK = np.broadcast_to(np.arange(size_M)[:, None], (size_M, depths))
    arrays = [
        *(filled(axis.slot, size_T, 0), filled(axis.position, size_T, 0), first),
        *(row_key, first[row_key], order, filled(target, size_M, 0)),
        *(grid.reshape(-1) for grid in (element_MK, depth_MK, target_MK, real_MK)),
        *(supervised_KN.reshape(-1), supervised_so_far(supervised_SK)),
    ]
    (
        slot_T, position_T, first_T, slot_N, first_N, order_N, target_M,
        element_X, depth_X, target_X, real_X, supervised_P, step_valid_K,
    ) = to_device(arrays, device)  # fmt: skip
    arange_T = torch.arange(size_T, device=device)
    rows = QueryRows(slot_N, first_N, order_N, (row_key[order], first[row_key[order]]))
    return RolloutPlan(
        slot_T=slot_T,
        span=None,
        position_T=position_T,
        every=QueryRows(arange_T, first_T, arange_T, (np.arange(size_T), first)),
        depths=(rows,) * depths,
        counts=(size_N,) * depths,
        target_M=target_M,
        head=HeadElements(element_X, depth_X, target_X, target_MK.reshape(-1), real_X.bool()),
        supervised_P=supervised_P.bool(),
        step_valid_K=step_valid_K,
    )


def _grid(
    supervised_SK: Bools, row_slot: Ints, target: Ints, sizes: tuple[int, int]
) -> tuple[Ints, Ints]:
    """[M, K] the element that asks for each target at each depth (the last row's if there is none),
    and whether there is one."""
    depth, (size_M, size_N) = np.arange(supervised_SK.shape[1]), sizes
    anchor_MK = target[:, None] - depth
    asked_MK = supervised_SK[np.maximum(anchor_MK, 0), depth] & (anchor_MK >= 0)
    row_of = np.full(len(supervised_SK), size_N - 1, dtype=np.int64)
    row_of[row_slot] = np.arange(len(row_slot))
    element_MK = np.broadcast_to(depth * size_N + size_N - 1, (size_M, len(depth))).copy()
    real_MK = np.zeros_like(element_MK)
    element_MK[: len(target)] = depth * size_N + np.where(asked_MK, row_of[anchor_MK], size_N - 1)
    real_MK[: len(target)] = asked_MK
    return element_MK, real_MK


def rounded(size: int, quantum: int) -> int:
    return -(-max(1, size) // quantum) * quantum


def filled(values: Ints, size: int, with_: int) -> Ints:
    result = np.full(size, with_, dtype=np.int64)
    result[: len(values)] = values
    return result
