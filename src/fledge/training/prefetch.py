"""Asks a remote target in advance, so that answers to the next batches are computed while the
current one is trained on. Targets in this process answer synchronously, in `step.py`."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.training.batches import StepBatch
from fledge.training.step import Models, Parts

_POLL_S = 0.5  # how often a request to stop is checked while waiting
_Futures = Collection[Future[Eagle3TargetBatch]]


class StopRequested(TargetUnreachable):
    """A rank was asked to stop while it, or another one, was waiting for the target."""


def ask_ahead(
    parts: Parts, batches: Iterator[StepBatch], *, stopping: Callable[[], bool] = lambda: False
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


def answers_ahead(
    models: Models,
    batches: Sequence[TokenBatch],
    *,
    rounds: int,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[TokenBatch, Eagle3TargetBatch]]:
    """Yield batches with their answers, while the next ones have already been requested. `rounds`
    is the number of batches of the rank that has the most: a rank that has fewer takes part in the
    others' passes and waits. Raises as `wait_together` does."""
    target = models.target
    ahead = target.prefetch if target.supports_async else 0
    pending: deque[Future[Eagle3TargetBatch]] = deque()
    try:
        for index, batch in enumerate(batches):
            while len(pending) <= ahead and index + len(pending) < len(batches):
                pending.append(target.answer_async(batches[index + len(pending)]))
            wait_together(models, [pending[0]], stopping)
            yield batch, pending.popleft().result()
        for _ in range(len(batches), rounds):
            target.join()
            wait_together(models, [], stopping)
    finally:
        for future in pending:
            future.cancel()


def wait_together(models: Models, futures: _Futures, stopping: Callable[[], bool]) -> None:
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
