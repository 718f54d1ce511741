"""Asks a remote target in advance, so that answers to the next batches are computed while the
current one is trained on. Targets in this process answer synchronously, in `step.py`."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend
from fledge.train.batches import StepBatch
from fledge.train.step import Models, Parts

_POLL_S = 0.5  # how often a request to stop is checked while waiting
_Futures = tuple[Future[Eagle3TargetBatch], ...]


def ask_ahead(
    parts: Parts, batches: Iterator[StepBatch], *, stopping: Callable[[], bool] = lambda: False
) -> Iterator[StepBatch]:
    """Yield the same batches in the same order, with answers if the target is asked in advance.

    At least `target.prefetch` micro-batches after the one that is yielded have been requested.
    Raises TargetUnreachable, on all ranks together and between two steps, when the target is gone
    or when a stop is requested while waiting for it.
    """
    target = parts.target
    if not target.supports_async:
        yield from batches
        return
    ahead = max(1, target.prefetch)
    pending: deque[tuple[StepBatch, _Futures]] = deque()
    try:
        for batch in batches:
            futures = tuple(target.answer_async(rows) for rows in batch.micro if rows is not None)
            pending.append((batch, futures))
            while sum(len(queued) for _, queued in pending) >= len(pending[0][1]) + ahead:
                yield _wait_for(parts, *pending.popleft(), stopping)
        while pending:
            yield _wait_for(parts, *pending.popleft(), stopping)
    finally:
        for _, futures in pending:
            for future in futures:
                future.cancel()


def answers_ahead(
    target: Eagle3TargetBackend, batches: Sequence[TokenBatch]
) -> Iterator[tuple[TokenBatch, Eagle3TargetBatch]]:
    """Yield batches with their answers, while the next ones have already been requested."""
    ahead = target.prefetch if target.supports_async else 0
    pending: deque[Future[Eagle3TargetBatch]] = deque()
    for index, batch in enumerate(batches):
        while len(pending) <= ahead and index + len(pending) < len(batches):
            pending.append(target.answer_async(batches[index + len(pending)]))
        yield batch, pending.popleft().result()


def _wait_for(
    parts: Parts, batch: StepBatch, futures: _Futures, stopping: Callable[[], bool]
) -> StepBatch:
    """Wait for a batch's answers and return it with them; the time counts as the target's."""

    def wait() -> None:
        for future in futures:
            while not future.done():
                with contextlib.suppress(NotYet):
                    future.exception(timeout=_POLL_S)
                if stopping() and not future.done():
                    raise TargetUnreachable("stopped while the target was asked")
            future.result()

    with parts.clock.phase("target"):
        together(parts, wait)
    return replace(batch, answers=futures)


def together(models: Models, ask: Callable[[], None]) -> None:
    """Call `ask` on every rank; if the target is unreachable for one of them, raise on all."""
    failure: TargetUnreachable | None = None
    try:
        ask()
    except TargetUnreachable as error:
        failure = error
    if models.target.supports_async and models.world.size > 1:
        failures = models.world.sum_(torch.tensor([int(failure is not None)], device=models.device))
        if failure is None and int(failures):
            failure = TargetUnreachable("the target servers of another rank do not answer")
    if failure is not None:
        raise failure
