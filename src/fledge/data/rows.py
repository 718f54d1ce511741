"""Views of token rows: subsets in a fixed order, and the split into training and held-out rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.core.terminal import counted

ONE_IN, MOST_HELD_OUT = 10, 512  # defaults for the number of held-out rows
_BLOCK = 4096  # rows per block where the data set has no blocks of its own


class Rows(Protocol):
    """Token rows by number: a prepared data set, or the rows of a cache."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Block:
    """Consecutive rows as columns: flat tokens, and where each row begins."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    places: Any  # Arrow strings
    truncated: Any  # Arrow booleans

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> "Block":
        import pyarrow as pa

        return cls(
            np.concatenate([row.input_ids for row in rows]),
            np.concatenate([row.loss_mask for row in rows]),
            np.cumsum([0, *(len(row.input_ids) for row in rows)]),
            pa.array([row.place for row in rows], pa.string()),
            pa.array([bool(row.truncated) for row in rows], pa.bool_()),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1


def blocks_of(rows: Rows) -> Iterator[Block]:
    """All rows in order, some thousands at a time: visiting millions one by one would be slow, and
    keeping them would take too much memory."""
    if hasattr(rows, "blocks"):  # a prepared data set is stored in blocks
        yield from rows.blocks()
        return
    for begin in range(0, len(rows), _BLOCK):
        yield Block.of([rows[i] for i in range(begin, min(begin + _BLOCK, len(rows)))])


def digest(ids: NDArray[Any]) -> int:
    """A number that equal tokens share, and in practice no others."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype=np.int32).data)


def digests(rows: Rows) -> NDArray[np.uint64]:
    """The digest of each row. A million rows of a thousand tokens take two seconds."""
    spans = ((x, pairwise(x.offsets.tolist())) for x in blocks_of(rows))
    found = (digest(x.ids[a:b]) for x, bounds in spans for a, b in bounds)
    return np.fromiter(found, dtype=np.uint64, count=len(rows))


def repeats(row_digests: NDArray[np.uint64]) -> int:
    """How many rows repeat an earlier one."""
    return len(row_digests) - len(np.unique(row_digests))


class RowView(Sequence[TokenRow]):
    """Some rows of a prepared data set, in a fixed order, without duplicates."""

    def __init__(self, rows: Rows, index: NDArray[np.int64]) -> None:
        self._rows, self._index = rows, index
        self.lengths: NDArray[np.int64] = rows.lengths[index]

    def through(self, rows: Rows) -> "RowView":
        """The same rows, read from another view of the data set."""
        return RowView(rows, self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> TokenRow:  # type: ignore[override]  # no slices
        row: TokenRow = self._rows[int(self._index[index])]
        return row

    def digests(self) -> NDArray[np.uint64]:
        """The digest of each row."""
        return digests(self._rows)[self._index]

    def prompts(self) -> NDArray[np.uint64]:
        """The digests of what precedes each answer, sorted and without repetitions."""
        wanted, begin = self._wanted(), 0
        found: set[int] = set()
        for block in blocks_of(self._rows):
            supervised_T = block.mask[: block.offsets[-1]] != 0
            ends = np.flatnonzero(supervised_T[1:] & ~supervised_T[:-1]) + 1
            row = np.searchsorted(block.offsets, ends, side="right") - 1
            starts = block.offsets[row]
            inside = wanted[begin + row] & (starts < ends)
            pairs = zip(starts[inside].tolist(), ends[inside].tolist(), strict=True)
            found.update(digest(block.ids[a:b]) for a, b in pairs)
            begin += len(block)
        return np.array(sorted(found), dtype=np.uint64)

    def _wanted(self) -> NDArray[np.bool_]:
        """Which rows of the data set are in this view."""
        wanted = np.zeros(len(self._rows), dtype=bool)
        wanted[self._index] = True
        return wanted

    def flat(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Tokens and their mask, block by block in the order of the data set; tokens of rows that
        are not in this view are masked."""
        wanted, begin = self._wanted(), 0
        for block in blocks_of(self._rows):
            wanted_T = np.repeat(wanted[begin : begin + len(block)], np.diff(block.offsets))
            tokens = slice(block.offsets[0], block.offsets[-1])
            yield block.ids[tokens], block.mask[tokens].astype(bool) & wanted_T
            begin += len(block)


def split_rows(
    rows: Rows, held_out: int | None, *, drop_truncated: bool = False
) -> tuple[RowView, RowView]:
    """(training rows, held-out rows). Rows of one conversation stay on one side, as do rows of the
    same tokens, and are counted once. `held_out` None: one in `ONE_IN`, at most `MOST_HELD_OUT`.

    A number that leaves almost nothing to train on is refused. The held-out rows are drawn with a
    fixed seed: they must be the same in every run on this data, or figures could not be compared.
    """
    conversation = _conversations(rows)
    if held_out != 0:
        conversation = _joined(conversation, digests(rows))
    count = int(conversation.max(initial=-1)) + 1
    order = np.random.default_rng(0).permutation(count)
    chosen = np.zeros(count, dtype=bool)
    chosen[order[: _held_out(count, held_out)]] = True
    out = chosen[conversation]
    keep = ~out & ~_truncated(rows) if drop_truncated else ~out
    return RowView(rows, np.flatnonzero(keep)), RowView(rows, np.flatnonzero(out))


def _conversations(rows: Rows) -> NDArray[np.int64]:
    """The conversation number of each row, in the lexical order of their places."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Copied, or every part would stay mapped: fifty bytes per row while they are compared.
    copies = [block.places.take(np.arange(len(block))) for block in blocks_of(rows)]
    ranks = pc.rank(pa.chunked_array(copies, pa.string()), tiebreaker="dense")
    conversation: NDArray[np.int64] = ranks.to_numpy().astype(np.int64) - 1
    del copies, ranks
    pa.default_memory_pool().release_unused()  # Arrow would keep it for reuse
    return conversation


def _joined(conversation: NDArray[np.int64], row_digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The same numbers if no row is repeated; else conversations that share a row have one."""
    if repeats(row_digests) == 0:
        return conversation
    _, same = np.unique(row_digests, return_inverse=True)
    joined = conversation
    while True:
        before = joined
        for group in (same, conversation):  # each takes the lowest number among its rows
            lowest = np.full(group.max() + 1, len(joined))
            np.minimum.at(lowest, group, joined)
            joined = lowest[group]
        if np.array_equal(joined, before):
            return np.unique(joined, return_inverse=True)[1]


def _truncated(rows: Rows) -> NDArray[np.bool_]:
    parts = [block.truncated.to_numpy(zero_copy_only=False) for block in blocks_of(rows)]
    return np.concatenate([np.zeros(0, dtype=bool), *parts])


def _held_out(total: int, requested: int | None) -> int:
    """The number of conversations, out of `total`, that are held out."""
    if requested is None:
        return min(MOST_HELD_OUT, total // ONE_IN)
    if requested and total - requested < max(1, total // ONE_IN):
        raise BadInput(
            f"{counted(requested, 'row is', 'rows are')} to be held out, and there are {total:,}: "
            f"{max(0, total - requested):,} would be left to train on",
            where="data.valid_rows",
            fix=f"leave it out: one row in {ONE_IN} is held out then",
        )
    return requested


@dataclass(frozen=True)
class KnownRows:
    """The rows that a target provides itself, and their split and fingerprint."""

    rows: Rows
    held_out: int  # number of last rows held out of training; 0: undecided
    fingerprint: str

    def split(self, held_out: int | None, *, drop_truncated: bool) -> tuple[RowView, RowView]:
        """(training rows, held-out rows), as in `split_rows` if it is undecided."""
        if not self.held_out:
            return split_rows(self.rows, held_out, drop_truncated=drop_truncated)
        index = np.arange(len(self.rows), dtype=np.int64)
        train, held_out_rows = np.split(index, [len(index) - self.held_out])
        if drop_truncated:
            train = train[~_truncated(self.rows)[train]]
        return RowView(self.rows, train), RowView(self.rows, held_out_rows)
