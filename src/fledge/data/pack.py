"""Packing: documents into rows of a fixed token budget, and rows into batches.

A padded batch is the case of one document per row. Worked example, width 8, documents of 3 and 2
tokens (trailing padding counts as part of the last document, so `seq_lens` sums to the width):

    position_ids    0 1 2 0 1 2 3 4
    attention_mask  1 1 1 1 1 0 0 0
    seq_lens        3 5
    doc_remaining   2 1 0 1 0 0 0 0     real tokens after the slot in its document
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch, TokenRow

WINDOW = 16384  # documents packed together: enough for a tight fit, few enough to stay shuffled

Overlong = Literal["cut", "drop", "split"]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of row `row`: a whole document, unless it was too long for a pack."""

    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Pack = tuple[Piece, ...]


@dataclass(frozen=True)
class Packing:
    """The packs of one epoch, in the order in which they are to be used."""

    packs: tuple[Pack, ...]
    budget: int
    cut: int = 0  # rows that lost their end
    dropped: int = 0
    split: int = 0

    @property
    def padding_share(self) -> float:
        total = len(self.packs) * self.budget
        used = sum(len(piece) for pack in self.packs for piece in pack)
        return 1 - used / total if total else 0.0


def pack_rows(
    lengths: NDArray[np.int64] | Sequence[int],
    budget: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    overlong: Overlong = "cut",
) -> Packing:
    """Best-fit packing of all rows, shuffled; the same seed and epoch give the same packs."""
    if budget < 1:
        raise BadInput(f"a pack of {budget} tokens holds nothing", fix="give a positive budget")
    sizes = np.asarray(lengths, dtype=np.int64)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(sizes))
    too_long = int((sizes > budget).sum())
    packs: list[Pack] = []
    for begin in range(0, len(order), WINDOW):
        rows = order[begin : begin + WINDOW]
        pieces = [p for row in rows for p in _pieces(int(row), int(sizes[row]), budget, overlong)]
        packs += _best_fit(pieces, budget)
    shuffled = tuple(packs[i] for i in rng.permutation(len(packs)))
    return Packing(
        shuffled,
        budget,
        cut=too_long if overlong == "cut" else 0,
        dropped=too_long if overlong == "drop" else 0,
        split=too_long if overlong == "split" else 0,
    )


def _pieces(row: int, length: int, budget: int, overlong: Overlong) -> list[Piece]:
    if length == 0 or (length > budget and overlong == "drop"):
        return []
    stop = min(length, budget) if overlong == "cut" else length
    return [Piece(row, i, min(i + budget, stop)) for i in range(0, stop, budget)]


def _best_fit(pieces: Sequence[Piece], budget: int) -> list[Pack]:
    """Longest first, each into the pack where it leaves the least room."""
    packs: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for piece in sorted(pieces, key=len, reverse=True):
        at = bisect_left(room, (len(piece), -1))
        if at == len(room):
            packs.append([])
            free, pack = budget, len(packs) - 1
        else:
            free, pack = room.pop(at)
        packs[pack].append(piece)
        if free > len(piece):
            insort(room, (free - len(piece), pack))
    return [tuple(pack) for pack in packs]


def one_per_row(lengths: Sequence[int], width: int) -> list[Pack]:
    """The padded batch: one document per row."""
    return [(Piece(row, 0, min(length, width)),) for row, length in enumerate(lengths)]


def collate(rows: Sequence[TokenRow], packs: Sequence[Pack], width: int, pad_id: int) -> TokenBatch:
    """Lay packs out as a batch of rows of `width` tokens."""
    import torch

    B = len(packs)
    ids_BT = np.full((B, width), pad_id, dtype=np.int64)
    attention_BT, loss_BT, position_BT, remaining_BT = (
        np.zeros((B, width), dtype=np.int64) for _ in range(4)
    )
    lens = np.zeros((B, max([1, *(len(pack) for pack in packs)])), dtype=np.int64)
    places = []
    for b, pack in enumerate(packs):
        at = 0
        documents = [rows[piece.row] for piece in pack]
        for d, (piece, row) in enumerate(zip(pack, documents, strict=True)):
            n, end = len(piece), at + len(piece)
            ids_BT[b, at:end] = row.input_ids[piece.start : piece.stop]
            loss_BT[b, at:end] = row.loss_mask[piece.start : piece.stop]
            position_BT[b, at:end] = np.arange(n)
            remaining_BT[b, at:end] = np.arange(n - 1, -1, -1)
            lens[b, d] = n
            at = end
        attention_BT[b, :at] = 1
        last = max(0, len(pack) - 1)
        position_BT[b, at:] = np.arange(lens[b, last], lens[b, last] + width - at)
        lens[b, last] += width - at
        places.append(tuple(row.place for row in documents))
    return TokenBatch(
        input_ids=torch.from_numpy(ids_BT),
        attention_mask=torch.from_numpy(attention_BT),
        loss_mask=torch.from_numpy(loss_BT),
        position_ids=torch.from_numpy(position_BT),
        seq_lens=torch.from_numpy(lens),
        doc_remaining=torch.from_numpy(remaining_BT),
        places=tuple(places),
    )
