"""The workers of one run as a rank sees them: which are up, which one is asked next, and retries
when one dies.

Ray restarts a worker that died, on another machine if need be. Questions in flight are lost with
it: the rank that asked notices, and asks another worker, or the same one when it is back. So every
question gets exactly one answer, whichever worker gives it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from fledge.core.errors import BadInput, TargetUnreachable, first_line
from fledge.target.ray.connection import import_ray

log = logging.getLogger("fledge.ray")

_POLL_EVERY_S, _RETRY_AFTER_S = 0.2, 1.0
_REMIND_EVERY_S = 30.0
# facts that must be equal for two workers to hold the same target
_IDENTITY = ("weights_fingerprint", "aux_layer_ids", "supervision", "dtype", "hidden_size")


@dataclass
class WorkerState:
    """The state of one worker, as far as this rank knows it."""

    name: str
    actor: Any
    up: bool = False
    in_flight: int = 0  # questions of this rank only
    asked: int = 0  # sequence number of this rank's last question to it
    greeting: Any = None  # the pending call that checks whether it is up
    loading: bool = False  # it is running and loads its target, which may take minutes
    not_before: float = 0.0  # earliest time to greet it again
    error: str = "not yet placed: is there room for it?"
    refusal: BaseException | None = None  # why it cannot be used, if it answered with an error


class Fleet:
    """Workers that hold the same target."""

    def __init__(
        self,
        workers: Sequence[tuple[str, Any]],
        *,
        wait_s: float,
        release: Callable[[], None],
        rank: int = 0,
    ) -> None:
        self._ray = import_ray()
        # Ranks start at different workers; otherwise the first question of each would go to the
        # same one.
        self._states = [
            WorkerState(name, actor, asked=(index - rank) % len(workers) - len(workers))
            for index, (name, actor) in enumerate(workers)
        ]
        self._turns = count()
        self._wait_s, self._release = wait_s, release
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._down_since: float | None = None
        self._reminded = 0.0
        self._facts: dict[str, Any] | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fledge-workers")
        self.asked_again = 0  # questions that were lost with a worker

    def __len__(self) -> int:
        return len(self._states)

    def open(self) -> dict[str, Any]:
        """Wait for the first worker and return the facts about its target. The others may come up
        later."""
        self._watcher.start()
        self._leave(self._take(None))
        assert self._facts is not None
        return self._facts

    def ask(self, use: Callable[[Any], Any], *, prefer: int | None = None) -> Any:
        """The result of the call that `use` makes on a worker, retried until a worker answers.
        `prefer` is the index of the worker to use if it is up."""
        while True:
            state = self._take(prefer)
            try:
                return self._result(use(state.actor))
            except self._ray.exceptions.RayTaskError as error:  # it answered with an exception
                raise _cause(error) from None
            except self._ray.exceptions.RayError as error:
                self._set_down(state, first_line(error))
                self.asked_again += 1
            finally:
                self._leave(state)

    def close(self) -> None:
        """Release the workers; they end if this process started them."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        if self._watcher.is_alive():
            self._watcher.join()
        self._states.clear()
        self._release()

    def _result(self, reference: Any) -> Any:
        """Wait for a result; polls, so that closing the fleet ends the wait."""
        while not self._ray.wait([reference], timeout=_POLL_EVERY_S)[0]:
            self._check_open()
        return self._ray.get(reference)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("this RayEagle3TargetModel is closed: build a new one")

    def _take(self, prefer: int | None) -> WorkerState:
        """The least loaded worker that is up, and of several the least recently asked one; waits
        until there is one."""
        with self._changed:
            while True:
                self._check_open()
                up = [state for state in self._states if state.up]
                if up:
                    self._down_since = None
                    state = min(up, key=lambda state: (state.in_flight, state.asked))
                    if prefer is not None:
                        preferred = self._states[prefer % len(self._states)]
                        state = preferred if preferred.up else up[prefer % len(up)]
                    state.in_flight += 1
                    state.asked = next(self._turns)
                    return state
                self._changed.wait(min(self._check_wait(), _POLL_EVERY_S))

    def _leave(self, state: WorkerState) -> None:
        with self._changed:
            state.in_flight -= 1
            self._changed.notify_all()

    def _check_wait(self) -> float:
        """Seconds left to wait while all workers are down; logs a reminder from time to time, and
        raises when the time is up."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since, self._reminded = now, 0.0
        if any(state.loading for state in self._states):
            self._down_since = now
        waited = now - self._down_since
        refusals = [state.refusal for state in self._states if state.refusal is not None]
        if len(refusals) == len(self._states):  # all are running, and none can be used
            raise refusals[0]
        why = ", ".join(f"{state.name}: {state.error}" for state in self._states)
        if waited >= self._wait_s:
            raise TargetUnreachable(
                f"no target worker answered for {waited:.0f} s ({why})",
                fix="give the cluster room for one and run the same command again",
            )
        if waited - self._reminded >= _REMIND_EVERY_S:
            self._reminded = waited
            left_s = self._wait_s - waited
            log.warning("no target worker answers (%s); waiting for another %.0f s", why, left_s)
        return self._wait_s - waited

    def _watch(self) -> None:
        """Greet the workers that are down until they answer, or the fleet is closed."""
        while not self._closed.wait(_POLL_EVERY_S):
            for state in self._states:
                if not state.up:
                    self._greet(state)

    def _greet(self, state: WorkerState) -> None:
        errors = self._ray.exceptions
        try:
            if state.greeting is None:
                if time.monotonic() >= state.not_before:
                    state.greeting = state.actor.figures.remote()  # the first sign of life
                return
            if not self._ray.wait([state.greeting], timeout=0)[0]:
                return
            facts = self._ray.get(state.greeting)
            if not state.loading:
                state.loading, state.greeting = True, state.actor.hello.remote()
                return
        except errors.RayTaskError as error:
            refusal = _cause(error)
            self._set_down(state, first_line(refusal), refusal=refusal)
        except errors.RayError as error:
            self._set_down(state, first_line(error))
        else:
            self._admit(state, facts)

    def _admit(self, state: WorkerState, facts: dict[str, Any]) -> None:
        """Use a worker from now on, if it holds the same target as the others."""
        with self._changed:
            self._facts = expected = self._facts or facts
            differing = [name for name in _IDENTITY if expected[name] != facts[name]]
            state.greeting, state.loading = None, False
            if not differing:
                state.up, state.error, state.refusal = True, "", None
                self._changed.notify_all()
        if differing:
            what = f"it holds another target than the others (different {', '.join(differing)})"
            fix = "the model's files must be the same on every machine"
            refusal = BadInput(what, where=state.name, fix=fix)
            self._set_down(state, str(refusal), refusal=refusal)
        else:
            log.info("target worker %s is up", state.name)

    def _set_down(
        self, state: WorkerState, why: str, *, refusal: BaseException | None = None
    ) -> None:
        with self._changed:
            before, state.up, state.error, state.refusal = state.error, False, why, refusal
            state.greeting, state.loading = None, False
            state.not_before = time.monotonic() + _RETRY_AFTER_S
            self._changed.notify_all()
        if before != why and not self._closed.is_set():
            log.warning("target worker %s is set aside: %s", state.name, why)


def _cause(error: Any) -> Exception:
    """The worker's own exception, if it could be serialized."""
    cause: Exception = error.cause if isinstance(error.cause, Exception) else error
    return cause
