"""Several ranks on the same rows (`training.context`): which slots each one computes.

Every slot of the key axis has one owner, who computes its state, its keys and values and whatever
is rolled out from it. Depth-0 keys and values are all that ranks give each other; a rollout's own
keys stay with its owner. All ranks make the whole plan from the same masks and take their part of
it, so nobody has to tell anybody who owns what.

The key axis is cut into two pieces a rank, equal in what they hold (slots, and elements of their
rollouts). Later slots of a document see more keys: the piece that attends most goes together with
the one that attends least. For a row of one document that is the usual zig-zag:

    slots            0  1  2  3  4  5  6  7
    piece            0  0  1  1  2  2  3  3
    rank of two      0  0  1  1  1  1  0  0

A rank reads the tokens of its own slots, and those behind them that its rollouts walk along. These
are the slots L, ascending, so k tokens on is k places on, as on the whole axis.

Shapes: O own slots; L slots whose tokens are read; T the whole key axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.core.distributed import World
from fledge.core.transfer import send
from fledge.rollout.cod import Bools, Ints
from fledge.rollout.slots import KeyAxis, Slots


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share their rows, and which of them this is."""

    rank: int
    size: int
    group: Any  # torch's process group

    @classmethod
    def of(cls, world: World) -> "ContextRanks | None":
        """None: every rank has its rows to itself."""
        if world.context == 1:
            return None
        assert world.mesh is not None
        return cls(world.context_rank, world.context, world.mesh.get_group("context"))


@dataclass(frozen=True)
class Gathering:
    """How the keys of some slots come together: every rank's own, filled up to the longest, end to
    end, and then in the order of the key axis."""

    ranks: ContextRanks
    longest: int
    place_T: Tensor  # where each slot lies among them


@dataclass(frozen=True)
class Share:
    """A rank's part of a plan, on the device."""

    slot_O: Tensor  # own slots in the flattened batch
    slot_L: Tensor  # slots whose tokens are read, in the flattened batch
    position_L: Tensor  # their rotary positions
    own_O: Tensor  # where the own slots lie on L
    anchor_N: Tensor  # where each row's anchor lies on O
    read_N: Tensor  # and on L
    gathering: Gathering  # of all slots

    def states(self, values_BT: Tensor) -> Tensor:
        """The rows [O, ...] of a batch tensor [B, T, ...] at own slots: a copy, so that the batch
        may go."""
        return values_BT.flatten(0, 1).index_select(0, self.slot_O)

    def tokens(self, values_BT: Tensor) -> Tensor:
        """The same [L, ...] at the slots whose tokens are read."""
        return values_BT.flatten(0, 1).index_select(0, self.slot_L)


class Part(NamedTuple):
    """The same on the host, with what the plan is made from cut down to it."""

    owner: Ints  # [T] the rank of each slot
    own: Ints  # [O] its slots on the key axis
    mine: Bools  # [S] the same in the flattened batch
    slots: Slots  # targets: those that its elements ask for
    axis: KeyAxis  # rows: its own

    def share(self, ranks: ContextRanks, device: torch.device, *, depths: int) -> Share:
        """`depths`: how many tokens a rollout reads; 1: its anchor's alone."""
        axis = self.axis
        read = [self.own, *(axis.row_key[:n] + k for k, n in enumerate(axis.counts[:depths]))]
        at = np.unique(np.concatenate(read))
        own_at = np.searchsorted(at, self.own)
        anchor = np.searchsorted(self.own, axis.row_key)

        def sent(array: Ints) -> Tensor:
            return send(torch.from_numpy(array), device)

        return Share(
            slot_O=sent(axis.slot[self.own]),
            slot_L=sent(axis.slot[at]),
            position_L=sent(axis.position[at]),
            own_O=sent(own_at),
            anchor_N=sent(anchor),
            read_N=sent(own_at[anchor]),
            gathering=gathering(self.owner, ranks, device),
        )


def owners(axis: KeyAxis, size: int, *, element: int, ends: Sequence[int] | None = None) -> Ints:
    """[T] the rank that owns each slot. `element` is what an element costs, in slots that only
    leave keys: about, in time and in memory. With `ends`, of segments of the axis, each of them is
    shared out by itself."""
    load = np.ones(len(axis.slot), dtype=np.int64)
    for count in axis.counts:
        load += element * np.bincount(axis.row_key[:count], minlength=len(load))
    sees = np.arange(len(load)) - axis.first + 1
    owner = np.zeros(len(load), dtype=np.int64)
    begin = 0
    for end in (len(load),) if ends is None else ends:
        owner[begin:end] = _dealt(load[begin:end], sees[begin:end], size)
        begin = end
    return owner


def _dealt(load: Ints, sees: Ints, size: int) -> Ints:
    """The owners of neighboring slots: two pieces a rank."""
    if len(load) == 0:
        return load
    middle = np.cumsum(load) - load / 2
    piece = (middle * (2 * size) / load.sum()).astype(np.int64)
    attended = np.bincount(piece, weights=load * sees, minlength=2 * size)
    owner_of = np.empty(2 * size, dtype=np.int64)
    from_least = np.argsort(attended, kind="stable")
    owner_of[from_least] = np.minimum(np.arange(2 * size), np.arange(2 * size)[::-1])
    dealt: Ints = owner_of[piece]
    return dealt


def part_of(slots: Slots, asked_SK: Bools, axis: KeyAxis, owner: Ints, rank: int) -> Part:
    """`asked_SK`: the elements (slot, depth) that are asked for, of all ranks."""
    own = np.flatnonzero(owner == rank)
    mine = np.zeros(len(slots.start), dtype=np.bool_)
    mine[axis.slot[own]] = True
    target = np.zeros_like(mine)
    for k in range(min(asked_SK.shape[1], len(target))):
        target[k:] |= (asked_SK[:, k] & mine)[: len(target) - k]
    kept = owner[axis.row_key] == rank
    counts = tuple(int(kept[:count].sum()) for count in axis.counts)
    rows = axis._replace(row_slot=axis.row_slot[kept], row_key=axis.row_key[kept], counts=counts)
    return Part(owner, own, mine, replace(slots, target=target), rows)


def gathering(owner: Ints, ranks: ContextRanks, device: torch.device) -> Gathering:
    """Of slots with these owners, each rank's own in their order."""
    counts = np.bincount(owner, minlength=ranks.size)
    longest, place = int(counts.max(initial=0)), np.empty(len(owner), dtype=np.int64)
    for rank in range(ranks.size):
        place[owner == rank] = rank * longest + np.arange(counts[rank])
    return Gathering(ranks, longest, send(torch.from_numpy(place), device))
