"""Asking a distant target early: the answers of the next batches are on their way while this one
is trained on. Targets in this process answer when they are asked, in `step.py`."""

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

_LOOK_AROUND_S = 0.5
_Futures = tuple[Future[Eagle3TargetBatch], ...]


def ask_ahead(
    parts: Parts, batches: Iterator[StepBatch], *, stopping: Callable[[], bool] = lambda: False
) -> Iterator[StepBatch]:
    """The same batches in the same order, with the target's answers where it is asked in advance.

    At least `target.prefetch` micro-batches behind the one that is handed out have been asked for.
    Raises TargetUnreachable, on all ranks together and between two steps, when the target is gone
    or when a stop was asked for while we wait for it.
    """
    target = parts.target
    if not target.supports_async:
        yield from batches
        return
    ahead = max(1, target.prefetch)
    asked: deque[tuple[StepBatch, _Futures]] = deque()
    try:
        for batch in batches:
            futures = tuple(target.answer_async(rows) for rows in batch.micro if rows is not None)
            asked.append((batch, futures))
            while sum(len(later) for _, later in asked) >= len(asked[0][1]) + ahead:
                yield _arrived(parts, *asked.popleft(), stopping)
        while asked:
            yield _arrived(parts, *asked.popleft(), stopping)
    finally:
        for _, futures in asked:
            for future in futures:
                future.cancel()


def answers_ahead(
    target: Eagle3TargetBackend, batches: Sequence[TokenBatch]
) -> Iterator[tuple[TokenBatch, Eagle3TargetBatch]]:
    """Batches with their answers, the next ones asked for meanwhile."""
    ahead = target.prefetch if target.supports_async else 0
    asked: deque[Future[Eagle3TargetBatch]] = deque()
    for index, batch in enumerate(batches):
        while len(asked) <= ahead and index + len(asked) < len(batches):
            asked.append(target.answer_async(batches[index + len(asked)]))
        yield batch, asked.popleft().result()


def _arrived(
    parts: Parts, batch: StepBatch, futures: _Futures, stopping: Callable[[], bool]
) -> StepBatch:
    """The batch with its answers, which are waited for; the time counts as the target's."""

    def wait() -> None:
        for future in futures:
            while not future.done():
                with contextlib.suppress(NotYet):
                    future.exception(timeout=_LOOK_AROUND_S)
                if stopping() and not future.done():
                    raise TargetUnreachable("stopped while the target was asked")
            future.result()

    with parts.clock.phase("target"):
        together(parts, wait)
    return replace(batch, answers=futures)


def together(models: Models, ask: Callable[[], None]) -> None:
    """Call `ask` on every rank; when the target is gone for one of them, raise on all of them."""
    failure: TargetUnreachable | None = None
    try:
        ask()
    except TargetUnreachable as error:
        failure = error
    if models.target.supports_async and models.world.size > 1:
        lost = models.world.sum_(torch.tensor([int(failure is not None)], device=models.device))
        if failure is None and int(lost):
            failure = TargetUnreachable("the target servers of another rank do not answer")
    if failure is not None:
        raise failure
