"""What is true between two rounds: which slots the target verified last, and its states there.

Slot t is the target's aux states at token t together with token t + 1. A round that accepts n
tokens makes n + 1 slots true: that of the token it started from, and those of the accepted ones.

Shapes: B rows, Q slots, left-aligned (as many as the longest row has, or ever can have where
shapes stay fixed), D aux states side by side, C = 2 + 2Q columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.transfer import send


@dataclass(frozen=True)
class RowState:
    """One row between two rounds, as the host knows it."""

    length: int
    tokens: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class RoundTable:
    """All that the host tells the device in a round, by name."""

    packed_BC: Tensor  # the others, side by side: one copy to the device, one input of a pass
    length_B: Tensor  # tokens in the target's cache: all that are known but the newest
    count_B: Tensor  # how many of the Q slots are real
    token_BQ: Tensor  # the token behind each slot's own; the last real one is the newest of all
    place_BQ: Tensor  # where each slot's own token stood among those of the target's last pass

    @classmethod
    def to_device(
        cls, rows: Sequence[RowState], device: torch.device, *, width: int
    ) -> "RoundTable":
        """Send rows of up to `width` slots, in one copy."""
        packed = []
        for row in rows:
            count = len(row.tokens)
            padding = [0] * (width - count)
            places = [*row.places, *range(count, width)]
            packed.append([row.length, count, *row.tokens, *padding, *places])
        return cls.unpack(send(torch.tensor(packed), device))

    @classmethod
    def unpack(cls, packed_BC: Tensor) -> "RoundTable":
        token_BQ, place_BQ = packed_BC[:, 2:].chunk(2, dim=1)
        return cls(packed_BC, packed_BC[:, 0], packed_BC[:, 1], token_BQ, place_BQ)

    def with_states(self, aux_BQD: Tensor, used: int) -> "RoundState":
        return RoundState(**vars(self), aux_BQD=aux_BQD, used=used)


@dataclass(frozen=True)
class RoundState(RoundTable):
    """What a strategy drafts from: everything that was verified since it drafted last."""

    aux_BQD: Tensor  # the target's states of the slots' own tokens
    used: int  # how far to look in the strategy's cache: what its `reserve` returned

    @property
    def start_B(self) -> Tensor:  # noqa: N802  (its shape)
        """Each row's first new slot."""
        return self.length_B - self.count_B

    @property
    def anchor_B(self) -> Tensor:  # noqa: N802
        """Each row's last slot: where its rollout starts."""
        return self.length_B - 1
