"""Views of token rows: some of them in an order, and which are held out of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.core.text import counted

ONE_IN, MOST_HELD_OUT = 10, 512  # held out where nobody says how many


class Rows(Protocol):
    """Token rows by number: a prepared data set, or the rows of a cache."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class RowView(Sequence[TokenRow]):
    """Some rows of a prepared data set, in a fixed order."""

    def __init__(self, rows: Rows, index: NDArray[np.int64]) -> None:
        self._rows, self._index = rows, index
        self.lengths: NDArray[np.int64] = rows.lengths[index]

    def through(self, rows: Rows) -> "RowView":
        """The same rows, taken from another view of the data set."""
        return RowView(rows, self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> TokenRow:  # type: ignore[override]  # no slices
        row: TokenRow = self._rows[int(self._index[index])]
        return row


def split_rows(
    rows: Rows, held_out: int | None, *, drop_truncated: bool = False, begun: bool = False
) -> tuple[RowView, RowView]:
    """(training rows, held-out rows). Rows of one conversation stay on one side, and are counted
    once. `held_out` None: one in `ONE_IN`, at most `MOST_HELD_OUT`.

    A number that leaves next to nothing to train on is refused, unless a run has `begun` with it:
    it keeps its rows. The held-out ones are drawn with a fixed seed: they must be the same in every
    run on this data, or figures could not be compared.
    """
    places, keep = [], np.ones(len(rows), dtype=bool)
    for i in range(len(rows)):
        row = rows[i]
        places.append(row.place)
        keep[i] = not (drop_truncated and row.truncated)
    conversations = sorted(set(places))
    order = np.random.default_rng(0).permutation(len(conversations))
    count = _held_out(len(conversations), held_out, begun=begun)
    chosen = {conversations[i] for i in order[:count]}
    out = np.array([place in chosen for place in places], dtype=bool)
    index = np.arange(len(rows), dtype=np.int64)
    return RowView(rows, index[keep & ~out]), RowView(rows, index[out])


def _held_out(total: int, asked: int | None, *, begun: bool) -> int:
    """How many of `total` conversations are held out."""
    if asked is None:
        return min(MOST_HELD_OUT, total // ONE_IN)
    if asked and not begun and total - asked < max(1, total // ONE_IN):
        raise BadInput(
            f"{counted(asked, 'row is', 'rows are')} to be held out, and there are {total:,}: "
            f"{max(0, total - asked):,} would be left to train on",
            where="data.valid_rows",
            fix=f"leave it out: one row in {ONE_IN} is held out then",
        )
    return min(asked, max(0, total - 1))


@dataclass(frozen=True)
class KnownRows:
    """The rows that a target brings itself, and what it knows of them."""

    rows: Rows
    held_out: int  # so many of the last ones are held out of training; 0: nobody has decided
    fingerprint: str

    def split(
        self, held_out: int | None, *, drop_truncated: bool, begun: bool = False
    ) -> tuple[RowView, RowView]:
        """(training rows, held-out rows), as `split_rows` where it has not been decided."""
        if not self.held_out:
            return split_rows(self.rows, held_out, drop_truncated=drop_truncated, begun=begun)
        index = np.arange(len(self.rows), dtype=np.int64)
        train, held = np.split(index, [len(index) - self.held_out])
        if drop_truncated:
            train = np.array([i for i in train if not self.rows[int(i)].truncated], dtype=np.int64)
        return RowView(self.rows, train), RowView(self.rows, held)
