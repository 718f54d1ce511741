"""Packing: documents into rows of a fixed token budget, and rows into batches.

A padded batch is the special case of one document per row. Worked example, width 8, documents of 3
and 2 tokens (trailing padding counts as part of the last document, so `seq_lens` sums to the
width):

    position_ids    0 1 2 0 1 2 3 4
    attention_mask  1 1 1 1 1 0 0 0
    seq_lens        3 5
    doc_remaining   2 1 0 1 0 0 0 0     real tokens after the slot in its document
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch, TokenRow

WINDOW = 16384  # documents packed together: enough for a tight fit, few enough to stay shuffled
_PACK_BITS = 32  # low bits of a sort key: free tokens above, pack index below


@dataclass(frozen=True)
class Piece:
    """The first `length` tokens of row `row`: all of them, unless it was too long for a pack."""

    row: int
    length: int

    def __len__(self) -> int:
        return self.length


Pack = tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Packs(Sequence[Pack]):
    """Packs in the order in which they are used, built from arrays on access: an epoch of millions
    of rows takes a few bytes per row, where objects would take hundreds.

    The rows are stored pack by pack; `order_P` is the order in which the packs are used.
    """

    row_N: NDArray[np.int32]
    first_P: NDArray[np.int64]  # index of each pack's first row, and the end of the last
    order_P: NDArray[np.int64]
    lengths: NDArray[np.int64]  # of the rows
    budget: int

    def __len__(self) -> int:
        return len(self.order_P)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        pack = self.order_P[index]
        row_M = self.row_N[self.first_P[pack] : self.first_P[pack + 1]]
        length_M = np.minimum(self.budget, self.lengths[row_M])
        return tuple(map(Piece, row_M.tolist(), length_M.tolist()))


@dataclass(frozen=True)
class Packing:
    """The packs of one epoch, in the order in which they are used."""

    packs: Packs
    budget: int
    cut: int = 0  # rows that lost their end

    @property
    def padding_share(self) -> float:
        total = len(self.packs) * self.budget
        tokens = int(np.minimum(self.packs.lengths, self.budget).sum())
        return 1 - tokens / total if total else 0.0


def pack_rows(
    lengths: NDArray[np.int64] | Sequence[int], budget: int, *, seed: int = 0, epoch: int = 0
) -> Packing:
    """Best-fit packing of all rows, shuffled; the same seed and epoch give the same packs. Longer
    rows are cut."""
    if budget < 1:
        raise BadInput(f"a pack of {budget} tokens holds nothing", fix="give a positive budget")
    sizes = np.asarray(lengths, dtype=np.int64)
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(sizes))
    windows = [
        _pack_window(order[begin : begin + WINDOW], sizes, budget)
        for begin in range(0, len(order), WINDOW)
    ]
    first_P = np.concatenate([[0], np.cumsum(_concat([counts for _, counts in windows], np.int64))])
    packs = Packs(
        row_N=_concat([rows for rows, _ in windows], np.int32),
        first_P=first_P,
        order_P=rng.permutation(len(first_P) - 1),
        lengths=sizes,
        budget=budget,
    )
    return Packing(packs, budget, cut=int((sizes > budget).sum()))


def _pack_window(
    rows: NDArray[np.int64], sizes: NDArray[np.int64], budget: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Place rows longest first, each into the pack where it leaves the least room. Returns the rows
    pack by pack, and how many each pack has."""
    rows = rows[sizes[rows] > 0]
    size_N = np.minimum(budget, sizes[rows])
    longest_N = np.argsort(-size_N, kind="stable")
    pack_N = np.array(_best_fit(size_N[longest_N].tolist(), budget), dtype=np.int64)
    by_pack_N = longest_N[np.argsort(pack_N, kind="stable")]
    return rows[by_pack_N].astype(np.int32), np.bincount(pack_N)


def _best_fit(sizes: Sequence[int], budget: int) -> list[int]:
    """The pack index of each piece; pieces are placed in the given order."""
    packs: list[int] = []
    room: list[int] = []  # free tokens and pack index in one number, ascending
    opened = 0
    for size in sizes:
        index = bisect_left(room, size << _PACK_BITS)
        if index == len(room):
            free, pack, opened = budget, opened, opened + 1
        else:
            free, pack = divmod(room.pop(index), 1 << _PACK_BITS)
        packs.append(pack)
        if free > size:
            insort(room, (free - size) << _PACK_BITS | pack)
    return packs


def _concat(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def one_per_row(lengths: Sequence[int], width: int) -> list[Pack]:
    """The packs of a padded batch: one document per row."""
    return [(Piece(row, min(length, width)),) for row, length in enumerate(lengths)]


def pad_rows(lengths: NDArray[np.int64], width: int, *, seed: int = 0, epoch: int = 0) -> Packing:
    """An epoch of padded rows: one document each, shuffled."""
    rows = len(lengths)
    packs = Packs(
        row_N=np.arange(rows, dtype=np.int32),
        first_P=np.arange(rows + 1),
        order_P=np.random.default_rng([seed, epoch]).permutation(rows),
        lengths=lengths,
        budget=width,
    )
    return Packing(packs, width)


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
        offset = 0
        documents = [rows[piece.row] for piece in pack]
        for d, (piece, row) in enumerate(zip(pack, documents, strict=True)):
            n, end = len(piece), offset + len(piece)
            ids_BT[b, offset:end] = row.input_ids[:n]
            loss_BT[b, offset:end] = row.loss_mask[:n]
            position_BT[b, offset:end] = np.arange(n)
            remaining_BT[b, offset:end] = np.arange(n - 1, -1, -1)
            lens[b, d] = n
            offset = end
        attention_BT[b, :offset] = 1
        last = max(0, len(pack) - 1)
        position_BT[b, offset:] = np.arange(lens[b, last], lens[b, last] + width - offset)
        lens[b, last] += width - offset
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
