"""What is true between two rounds: which slots the target verified last, and its states there.

Slot t is the target's aux states at token t together with token t + 1. A round that accepts n
tokens makes n + 1 slots true: that of the token it started from, and those of the accepted ones.

What the host tells the device in a round travels as one table, a row of X = 2 + 2Q numbers for each
text: one copy, one input of a pass. Q slots stand left-aligned, as many as the longest row has, or
ever can have where shapes stay fixed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.transfer import send


@dataclass(frozen=True)
class RoundState:
    """What a strategy drafts from: everything that was verified since it drafted last."""

    length_B: Tensor  # tokens in the target's cache: all that are known but the newest
    count_B: Tensor  # how many of the Q slots are real
    token_BQ: Tensor  # the token behind each slot's own; the last real one is the newest of all
    place_BQ: Tensor  # where each slot's own token stood among those of the target's last pass
    aux_BQD: Tensor  # the target's states of the slots' own tokens
    used: int  # how far to look in the strategy's cache: what its `reserve` returned

    @property
    def start_B(self) -> Tensor:  # noqa: N802  (its shape)
        """Each row's first new slot."""
        return self.length_B - self.count_B

    @property
    def anchor_B(self) -> Tensor:  # noqa: N802  (its shape)
        """Each row's last slot: where its rollout starts."""
        return self.length_B - 1


def send_rows(
    rows: Iterable[tuple[int, Sequence[int], Sequence[int]]], device: torch.device, *, width: int
) -> Tensor:
    """The table of rows (length, tokens, places) with up to `width` slots, in one copy."""
    table = []
    for length, tokens, places in rows:
        count = len(tokens)
        padding = [0] * (width - count)
        table.append([length, count, *tokens, *padding, *places, *range(count, width)])
    return send(torch.tensor(table), device)


def columns(table_BX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lengths, counts, tokens and places: the first four fields of a `RoundState`."""
    token_BQ, place_BQ = table_BX[:, 2:].chunk(2, dim=1)
    return table_BX[:, 0], table_BX[:, 1], token_BQ, place_BQ
