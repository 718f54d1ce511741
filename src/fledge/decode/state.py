"""The state between two rounds: which slots the target verified last, and its states there.

Slot t is the target's aux states at token t together with token t + 1. A round that accepts n
tokens verifies n + 1 slots: that of the token it started from, and those of the accepted ones.

What the host sends to the device in a round is one table with a row of X = 2 + 2Q numbers for each
text: one copy, one input of a pass. Its Q slots are left-aligned, as many as the longest row has
or, where shapes stay fixed, can have.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.transfer import send


@dataclass(frozen=True)
class RoundState:
    """What a strategy drafts from: everything verified since it last drafted."""

    length_B: Tensor  # tokens in the target's cache: all that are known but the newest
    count_B: Tensor  # how many of the Q slots are real
    token_BQ: Tensor  # the token after each slot's own; the last real one is the newest of all
    place_BQ: Tensor  # index of each slot's own token in the target's last pass
    aux_BQD: Tensor  # the target's states at the slots' own tokens
    used: int  # entries of the strategy's cache to read: what its `reserve` returned

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
    """Send a table of rows (length, tokens, places), of up to `width` slots each, in one copy."""
    table = []
    for length, tokens, places in rows:
        count = len(tokens)
        padding = [0] * (width - count)
        table.append([length, count, *tokens, *padding, *places, *range(count, width)])
    return send(torch.tensor(table), device)


def columns(table_BX: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The lengths, counts, tokens and places: the first four fields of a `RoundState`."""
    token_BQ, place_BQ = table_BX[:, 2:].chunk(2, dim=1)
    return table_BX[:, 0], table_BX[:, 1], token_BQ, place_BQ
