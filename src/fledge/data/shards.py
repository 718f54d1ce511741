"""The rows of sources in shards: runs of consecutive rows that processes claim to work on."""

import bisect
import itertools
from collections.abc import Iterator

from fledge.data.sources import Row, make_parts

NumberedRow = tuple[int, Row]  # from 0, over all sources


class Shards:
    """All rows, or the first `limit`, `size` per shard; fastest when read in order."""

    def __init__(self, sources: list[str], *, size: int, limit: int | None = None) -> None:
        self._parts, self._size = make_parts(sources), size
        self._starts, rows = [0], 0  # first row of each part
        for part in self._parts:
            rest = None if limit is None else limit - rows
            rows += sum(1 for _ in itertools.islice(part.rows(), rest))
            self._starts.append(rows)
        self.rows = rows
        self._stream: Iterator[Row] = iter(())
        self._next = rows  # the row that the stream yields next

    @property
    def names(self) -> list[str]:
        """Names of the shards, made of their rows: another shard size gives other claims."""
        firsts = range(0, self.rows, self._size)
        return [f"{first:09d}-{min(self.rows, first + self._size):09d}" for first in firsts]

    def read(self, name: str) -> list[NumberedRow]:
        """The rows of a shard. Rows before them in their part are skipped, once."""
        numbers = self.numbers(name)
        part = self._part_of(numbers.start)
        if numbers.start < self._next or part > self._part_of(self._next):
            self._stream = itertools.chain.from_iterable(p.rows() for p in self._parts[part:])
            self._next = self._starts[part]
        begin, end = numbers.start - self._next, numbers.stop - self._next
        self._next = numbers.stop
        return list(zip(numbers, itertools.islice(self._stream, begin, end), strict=True))

    @staticmethod
    def numbers(name: str) -> range:
        """The numbers of a shard's rows."""
        first, stop = map(int, name.split("-"))
        return range(first, stop)

    def _part_of(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1
