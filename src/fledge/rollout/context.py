"""Several ranks on the same rows (`training.context`): which slots each one computes.

Every slot of the key axis has one owner, the rank that computes its state, its keys and values and
the rollout from it. Ranks exchange depth-0 keys and values only; a rollout's own keys stay with its
owner. All ranks compute the whole plan from the same masks and take their part of it, so ownership
need not be communicated.

The key axis is cut into two pieces per rank, of equal load (slots, and elements of their rollouts).
Later slots of a document see more keys: the piece that attends most is paired with the one that
attends least. For a row of one document that is the usual zig-zag:

    slots            0  1  2  3  4  5  6  7
    piece            0  0  1  1  2  2  3  3
    rank of two      0  0  1  1  1  1  0  0

A rank reads the tokens of its own slots, and those after them that its rollouts follow. These are
the slots L, ascending, so k tokens later is k places later, as on the whole axis.

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
from fledge.rollout.slots import Bools, Ints, KeyAxis, Slots, slots_asked_for


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share their rows, and this rank's index among them."""

    rank: int
    size: int
    group: Any  # torch's process group

    @classmethod
    def of(cls, world: World) -> "ContextRanks | None":
        """Returns None when ranks do not share rows."""
        if world.context == 1:
            return None
        assert world.mesh is not None
        return cls(world.context_rank, world.context, world.mesh.get_group("context"))


@dataclass(frozen=True)
class Gathering:
    """How the keys of some slots are gathered: every rank's own, padded to the longest, end to end,
    and then permuted to the order of the key axis."""

    ranks: ContextRanks
    longest: int
    place_T: Tensor  # index of each slot among the gathered keys


@dataclass(frozen=True)
class Share:
    """A rank's part of a plan, on the device."""

    slot_O: Tensor  # own slots in the flattened batch
    slot_L: Tensor  # slots whose tokens are read, in the flattened batch
    position_L: Tensor  # their rotary positions
    own_O: Tensor  # indices of the own slots on L
    anchor_N: Tensor  # index of each row's anchor on O
    read_N: Tensor  # and on L
    gathering: Gathering  # of all slots

    def states(self, values_BT: Tensor) -> Tensor:
        """The rows [O, ...] of a batch tensor [B, T, ...] at own slots: a copy, so that the batch
        can be freed."""
        return values_BT.flatten(0, 1).index_select(0, self.slot_O)

    def tokens(self, values_BT: Tensor) -> Tensor:
        """The same [L, ...] at the slots whose tokens are read."""
        return values_BT.flatten(0, 1).index_select(0, self.slot_L)


class Part(NamedTuple):
    """The same on the host, with the inputs of planning restricted to this part."""

    owner: Ints  # [T] the rank of each slot
    own: Ints  # [O] its slots on the key axis
    mine: Bools  # [S] the same in the flattened batch
    slots: Slots  # with the targets that its elements ask for
    axis: KeyAxis  # with its own rows

    def share(self, ranks: ContextRanks, device: torch.device, *, depths: int) -> Share:
        """The part on the device. `depths`: tokens that a rollout reads; 1: its anchor's only."""
        axis = self.axis
        keys = [self.own, *(axis.row_key[:n] + k for k, n in enumerate(axis.counts[:depths]))]
        read = np.unique(np.concatenate(keys))
        own = np.searchsorted(read, self.own)
        anchor = np.searchsorted(self.own, axis.row_key)

        def sent(array: Ints) -> Tensor:
            return send(torch.from_numpy(array), device)

        return Share(
            slot_O=sent(axis.slot[self.own]),
            slot_L=sent(axis.slot[read]),
            position_L=sent(axis.position[read]),
            own_O=sent(own),
            anchor_N=sent(anchor),
            read_N=sent(own[anchor]),
            gathering=gathering(self.owner, ranks, device),
        )


def owners(axis: KeyAxis, size: int, *, element: int, ends: Sequence[int] | None = None) -> Ints:
    """[T] the rank that owns each slot. `element` is the approximate cost of an element, in time
    and memory, relative to a slot that only produces keys. With `ends`, those of segments of the
    axis, each segment is distributed separately."""
    load = np.ones(len(axis.slot), dtype=np.int64)
    for count in axis.counts:
        load += element * np.bincount(axis.row_key[:count], minlength=len(load))
    visible = np.arange(len(load)) - axis.first + 1
    owner = np.zeros(len(load), dtype=np.int64)
    begin = 0
    for end in (len(load),) if ends is None else ends:
        owner[begin:end] = _deal(load[begin:end], visible[begin:end], size)
        begin = end
    return owner


def _deal(load: Ints, visible: Ints, size: int) -> Ints:
    """The owners of consecutive slots: two pieces per rank."""
    if len(load) == 0:
        return load
    middle = np.cumsum(load) - load / 2
    piece = (middle * (2 * size) / load.sum()).astype(np.int64)
    attended = np.bincount(piece, weights=load * visible, minlength=2 * size)
    owner_of = np.empty(2 * size, dtype=np.int64)
    from_least = np.argsort(attended, kind="stable")
    owner_of[from_least] = np.minimum(np.arange(2 * size), np.arange(2 * size)[::-1])
    owner: Ints = owner_of[piece]
    return owner


def part_of(slots: Slots, asked_SK: Bools, axis: KeyAxis, owner: Ints, rank: int) -> Part:
    """The part of one rank. `asked_SK`: the elements (slot, depth) that all ranks ask for."""
    own = np.flatnonzero(owner == rank)
    mine = np.zeros(len(slots.start), dtype=np.bool_)
    mine[axis.slot[own]] = True
    target = slots_asked_for(asked_SK & mine[:, None])
    kept = owner[axis.row_key] == rank
    counts = tuple(int(kept[:count].sum()) for count in axis.counts)
    rows = axis._replace(row_slot=axis.row_slot[kept], row_key=axis.row_key[kept], counts=counts)
    return Part(owner, own, mine, replace(slots, target=target), rows)


def gathering(owner: Ints, ranks: ContextRanks, device: torch.device) -> Gathering:
    """The gathering of slots with these owners; each rank contributes its own in order."""
    counts = np.bincount(owner, minlength=ranks.size)
    longest, place = int(counts.max(initial=0)), np.empty(len(owner), dtype=np.int64)
    for rank in range(ranks.size):
        place[owner == rank] = rank * longest + np.arange(counts[rank])
    return Gathering(ranks, longest, send(torch.from_numpy(place), device))
