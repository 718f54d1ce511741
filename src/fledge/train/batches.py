"""The order of the data: which packs a step takes, for every rank, from any step on.

All epochs laid end to end are one stream of packs; step s takes the next
`micro_batch * accumulate * data_size` of it. The order depends only on seed, epoch and data, so a
resumed run needs nothing but its step number, and N ranks together see what one rank would.
"""

import queue
import threading
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.distributed import World
from fledge.core.rows import TokenBatch
from fledge.data.pack import Pack, Packing, collate, one_per_row, pack_rows
from fledge.data.rows import RowView


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of an optimizer step: micro-batches, or None where the data ran out."""

    step: int
    epoch: int
    micro: tuple[TokenBatch | None, ...]
    # one for each that is not None, where the target was asked in advance: see `ahead.py`
    answers: tuple[Future[Eagle3TargetBatch], ...] | None = None


class PackStream:
    """Batches by step number."""

    def __init__(
        self,
        rows: RowView,
        *,
        tokens: int,
        pad_id: int,
        seed: int,
        padded: bool = False,
        micro_batch: int = 1,
        accumulate: int = 1,
        epochs: int = 1,
        steps: int | None = None,
        world: World | None = None,
    ) -> None:
        self.rows, self.tokens, self.pad_id = rows, tokens, pad_id
        self._seed, self._padded = seed, padded
        self._micro, self._accumulate = micro_batch, accumulate
        self._world = world or World()
        self._epochs: list[Packing] = []  # packings made so far, in order
        self._first: list[int] = [0]  # stream position at which each epoch begins
        self.packs_per_step = micro_batch * accumulate * self._world.data_size
        self._end: int | None = None
        if steps is None:
            while len(self._epochs) < epochs:
                self._add_epoch()
            steps = -(-self._first[epochs] // self.packs_per_step)
            self._end = self._first[epochs]
        self.steps = steps

    def _add_epoch(self) -> None:
        epoch = len(self._epochs)
        if self._padded:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self.rows))
            packs = one_per_row(list(self.rows.lengths), self.tokens)
            packing = Packing(tuple(packs[i] for i in order), self.tokens)
        else:
            packing = pack_rows(self.rows.lengths, self.tokens, seed=self._seed, epoch=epoch)
        self._epochs.append(packing)
        self._first.append(self._first[-1] + len(packing.packs))

    def _at(self, position: int) -> tuple[int, Pack] | None:
        """(epoch, pack) at a position of the stream; None past its end."""
        if self._end is not None and position >= self._end:
            return None
        while position >= self._first[-1]:
            self._add_epoch()
        epoch = int(np.searchsorted(self._first, position, side="right")) - 1
        return epoch, self._epochs[epoch].packs[position - self._first[epoch]]

    @property
    def padding_share(self) -> float:
        if not self._epochs:
            self._add_epoch()
        return self._epochs[0].padding_share

    def batch(self, step: int) -> StepBatch:
        """This rank's micro-batches of step `step`."""
        begin = step * self.packs_per_step
        first = self._at(begin)
        assert first is not None, f"step {step} is past the last one ({self.steps})"
        micro = []
        for index in range(self._accumulate):
            start = begin + (index * self._world.data_size + self._world.data_rank) * self._micro
            stop = start + self._micro if self._end is None else min(start + self._micro, self._end)
            positions = [self._at(position) for position in range(start, stop)]
            packs = [at[1] for at in positions if at is not None]
            micro.append(collate(self.rows, packs, self.tokens, self.pad_id) if packs else None)
        return StepBatch(step, first[0], tuple(micro))

    def prefetched(self, start: int, ahead: int) -> Generator[StepBatch, None, None]:
        """Batches from step `start` to the end, `ahead` of them prepared by a thread, which ends
        with the last one or when the generator is closed."""
        if ahead == 0:
            yield from (self.batch(step) for step in range(start, self.steps))
            return
        ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(ahead)
        stop = threading.Event()

        def offer(item: StepBatch | BaseException | None) -> None:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return
                except queue.Full:
                    continue

        def work() -> None:
            try:
                for step in range(start, self.steps):
                    if stop.is_set():
                        return
                    offer(self.batch(step))
                offer(None)
            except BaseException as error:  # noqa: BLE001  (raised where the batch is awaited)
                offer(error)

        thread = threading.Thread(target=work, daemon=True, name="fledge-batches")
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()
