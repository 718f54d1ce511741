"""The order of the data: which packs a step takes, for every rank, from any step on.

All epochs laid end to end are one stream of packs; step s takes the next
`micro_batch * accumulate * data_size` of it. The order depends only on seed, epoch and data, so a
resumed run needs nothing but its step number, and N ranks together see what one rank would.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.distributed import World
from fledge.core.errors import TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.data.pack import Pack, Packing, collate, pack_rows, pad_rows
from fledge.data.rows import RowView

if TYPE_CHECKING:
    from fledge.training.step import Models


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of an optimizer step: micro-batches, or None where the data ran out."""

    step: int
    epoch: int
    micro: tuple[TokenBatch | None, ...]
    # one for each that is not None, where the target was asked in advance: see `ahead.py`
    answers: tuple[Future[Eagle3TargetBatch], ...] | None = None


def held_out_share(batches: Sequence[TokenBatch], world: World) -> range:
    """Indices of the held-out packs that this rank evaluates."""
    return range(world.rank, len(batches), world.size)


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
        # Two packings are kept, the one that ends and the one that begins.
        self._packing = lru_cache(maxsize=2)(self._pack)
        self._first: list[int] = [0]  # stream position at which each epoch begins
        self._padding: list[float] = []  # share of it in each epoch
        self.packs_per_step = micro_batch * accumulate * self._world.data_size
        self._end: int | None = None
        if steps is None:
            while len(self._padding) < epochs:
                self._add_epoch()
            steps = -(-self._first[epochs] // self.packs_per_step)
            self._end = self._first[epochs]
        self.steps = steps

    def _pack(self, epoch: int) -> Packing:
        pack = pad_rows if self._padded else pack_rows
        return pack(self.rows.lengths, self.tokens, seed=self._seed, epoch=epoch)

    def _add_epoch(self) -> None:
        packing = self._packing(len(self._padding))
        self._first.append(self._first[-1] + len(packing.packs))
        self._padding.append(packing.padding_share)

    def _at(self, position: int) -> tuple[int, Pack] | None:
        """(epoch, pack) at a position of the stream; None past its end."""
        if self._end is not None and position >= self._end:
            return None
        while position >= self._first[-1]:
            self._add_epoch()
        epoch = bisect_right(self._first, position) - 1
        return epoch, self._packing(epoch).packs[position - self._first[epoch]]

    @property
    def padding_share(self) -> float:
        """Of the first epoch."""
        if not self._padding:
            self._add_epoch()
        return self._padding[0]

    def batch(self, step: int) -> StepBatch:
        """This rank's micro-batches of step `step`."""
        begin = step * self.packs_per_step
        first = self._at(begin)
        assert first is not None, f"step {step} is past the last one ({self.steps})"
        micro = [self._micro_packs(step, index) for index in range(self._accumulate)]
        return StepBatch(
            step, first[0], tuple(self._collate(packs) if packs else None for packs in micro)
        )

    def _micro_packs(self, step: int, index: int) -> list[Pack]:
        """The packs of this rank's micro-batch `index` of a step; none when the data ran out."""
        place = index * self._world.data_size + self._world.data_rank
        start = step * self.packs_per_step + place * self._micro
        stop = start + self._micro if self._end is None else min(start + self._micro, self._end)
        positions = (self._at(position) for position in range(start, stop))
        return [at[1] for at in positions if at is not None]

    def _collate(self, packs: Sequence[Pack]) -> TokenBatch:
        return collate(self.rows, packs, self.tokens, self.pad_id)

    def micro_batches_before(self, step: int) -> Iterator[Callable[[], TokenBatch]]:
        """This rank's micro-batches of the steps before `step`, in order, each collated when it is
        called. Ends with the first epoch: by then every row has been seen once."""
        self._at(0)  # packs the first epoch
        epoch_steps = -(-self._first[1] // self.packs_per_step)
        for earlier in range(min(step, epoch_steps)):
            for index in range(self._accumulate):
                if packs := self._micro_packs(earlier, index):
                    yield partial(self._collate, packs)

    def prefetched(self, start: int, ahead: int) -> Generator[StepBatch, None, None]:
        """Batches from step `start` to the end. While one is used, a thread prepares the next
        `ahead`; it ends with the last one, or when the generator is closed."""
        if ahead == 0:
            yield from (self.batch(step) for step in range(start, self.steps))
            return
        pending: deque[Future[StepBatch]] = deque()
        pool = ThreadPoolExecutor(1, thread_name_prefix="fledge-batches")
        try:
            for step in range(start, self.steps):
                pending.append(pool.submit(self.batch, step))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


# --- answers in advance ---------------------------------------------------------------------------
# A remote target is asked in advance, so that answers to the next batches are computed while the
# current one is trained on. Targets in this process answer synchronously, in `step.py`.

_POLL_S = 0.5  # how often a request to stop is checked while waiting
_Futures = Collection[Future[Eagle3TargetBatch]]


class StopRequested(TargetUnreachable):
    """A rank was asked to stop while it, or another one, was waiting for the target."""


def ask_ahead(
    parts: "Models", batches: Iterable[StepBatch], *, stopping: Callable[[], bool] = lambda: False
) -> Iterator[StepBatch]:
    """Yield the same batches in the same order, with answers if the target is asked in advance.

    At least `target.prefetch` micro-batches after the one that is yielded have been requested.
    Raises as `wait_together` does, between two steps.
    """
    target = parts.target
    if not target.supports_async:
        yield from batches
        return
    ahead = max(1, target.prefetch)
    pending: deque[tuple[StepBatch, tuple[Future[Eagle3TargetBatch], ...]]] = deque()

    def next_answered() -> StepBatch:
        batch, futures = pending[0]
        with parts.clock.phase("target"):
            wait_together(parts, futures, stopping)
        pending.popleft()
        return replace(batch, answers=futures)

    try:
        for batch in batches:
            futures = tuple(target.answer_async(rows) for rows in batch.micro if rows is not None)
            pending.append((batch, futures))
            while sum(len(queued) for _, queued in pending) >= len(pending[0][1]) + ahead:
                yield next_answered()
        while pending:
            yield next_answered()
    finally:
        for _, futures in pending:
            for future in futures:
                future.cancel()


def wait_together(models: "Models", futures: _Futures, stopping: Callable[[], bool]) -> None:
    """Wait until the futures of every rank are done. All ranks call it equally often.

    Raises on all ranks together, and soon: StopRequested when one of them is asked to stop,
    TargetUnreachable when the target is gone for one of them.
    """
    if not models.target.supports_async:
        return
    while True:
        done, waiting = wait(futures, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
        failure = _unreachable(done)
        counts = [len(waiting), int(failure is not None), int(stopping())]
        if models.world.size > 1:
            counts = models.world.sum_(torch.tensor(counts, device=models.device)).tolist()
        unfinished, failed, stops = counts
        if not unfinished and not failed:
            return  # a stop waits for the step
        if stops:
            raise StopRequested("stopped while the target was asked")
        if failed:
            elsewhere = "the target servers of another rank do not answer"
            raise failure or TargetUnreachable(elsewhere)


def _unreachable(done: _Futures) -> TargetUnreachable | None:
    """The failure of a future whose target is gone; any other error is raised here."""
    for future in done:
        try:
            future.result()
        except TargetUnreachable as error:
            return error
    return None
