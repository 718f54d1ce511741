"""The workers of one run as a rank sees them: which are up, which one is asked next, and asking
again where one died.

Ray restarts a worker that died, on another machine if need be. What it was asked meanwhile is lost
with it: the rank that asked knows, and asks another worker, or the same one when it is back. So an
answer is about the rows that were asked, whoever gave it, and there is exactly one.
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

_LOOK_EVERY_S, _PAUSE_S = 0.2, 1.0
_REMIND_S = 30.0
# what two workers must have in common to be the same target
_IDENTITY = ("weights_fingerprint", "aux_layer_ids", "supervision", "dtype", "hidden_size")


@dataclass
class WorkerState:
    """What is known of one worker."""

    name: str
    actor: Any
    up: bool = False
    in_flight: int = 0  # this rank's own questions
    asked: int = 0  # when this rank last asked it, as a number
    greeting: Any = None  # a word to it that is under way
    loading: bool = False  # it is there, and loads its target: minutes, of a large one
    not_before: float = 0.0  # when to greet it again
    error: str = "not yet placed: is there room for it?"
    refusal: BaseException | None = None  # what it said instead of its name


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
        # Ranks begin at different workers: with one question each, all would ask the first one.
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
        self.asked_again = 0  # questions that died with a worker

    def __len__(self) -> int:
        return len(self._states)

    def open(self) -> dict[str, Any]:
        """Wait for the first worker; what it says of its target. The others may come later."""
        self._watcher.start()
        self._leave(self._take(None))
        assert self._facts is not None
        return self._facts

    def ask(self, use: Callable[[Any], Any], *, prefer: int | None = None) -> Any:
        """The answer to the call that `use` makes of a worker, asked until one has given it.
        `prefer`: the worker of that number, where it is up."""
        while True:
            state = self._take(prefer)
            try:
                return self._result(use(state.actor))
            except self._ray.exceptions.RayTaskError as error:  # it answered: with an exception
                raise _told(error) from None
            except self._ray.exceptions.RayError as error:
                self._set_down(state, first_line(error))
                self.asked_again += 1
            finally:
                self._leave(state)

    def close(self) -> None:
        """Let go of the workers; they end if this process started them."""
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
        """Looks up now and then: a closed fleet has no time to wait."""
        while not self._ray.wait([reference], timeout=_LOOK_EVERY_S)[0]:
            self._check_open()
        return self._ray.get(reference)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("this RayEagle3TargetModel is closed: build a new one")

    def _take(self, prefer: int | None) -> WorkerState:
        """The least loaded worker that is up, of several the one that was asked longest ago;
        waits for one."""
        with self._changed:
            while True:
                self._check_open()
                up = [state for state in self._states if state.up]
                if up:
                    self._down_since = None
                    state = min(up, key=lambda state: (state.in_flight, state.asked))
                    if prefer is not None:
                        wanted = self._states[prefer % len(self._states)]
                        state = wanted if wanted.up else up[prefer % len(up)]
                    state.in_flight += 1
                    state.asked = next(self._turns)
                    return state
                self._changed.wait(min(self._while_all_are_down(), _LOOK_EVERY_S))

    def _leave(self, state: WorkerState) -> None:
        with self._changed:
            state.in_flight -= 1
            self._changed.notify_all()

    def _while_all_are_down(self) -> float:
        """Say so now and then, give up in the end; how long there is left to wait."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since, self._reminded = now, 0.0
        if any(state.loading for state in self._states):
            self._down_since = now
        waited = now - self._down_since
        refusals = [state.refusal for state in self._states if state.refusal is not None]
        if len(refusals) == len(self._states):  # all are there, and none can do it
            raise refusals[0]
        why = ", ".join(f"{state.name}: {state.error}" for state in self._states)
        if waited >= self._wait_s:
            raise TargetUnreachable(
                f"no target worker answered for {waited:.0f} s ({why})",
                fix="give the cluster room for one and run the same command again",
            )
        if waited - self._reminded >= _REMIND_S:
            self._reminded = waited
            left = self._wait_s - waited
            log.warning("no target worker answers (%s); waiting, for another %.0f s", why, left)
        return self._wait_s - waited

    def _watch(self) -> None:
        """Greet the workers that are down until they answer, or the fleet is closed."""
        while not self._closed.wait(_LOOK_EVERY_S):
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
            refusal = _told(error)
            self._set_down(state, first_line(refusal), refusal=refusal)
        except errors.RayError as error:
            self._set_down(state, first_line(error))
        else:
            self._admit(state, facts)

    def _admit(self, state: WorkerState, facts: dict[str, Any]) -> None:
        """Use a worker from now on, if it holds the target that the others hold."""
        with self._changed:
            self._facts = known = self._facts or facts
            differing = [name for name in _IDENTITY if known[name] != facts[name]]
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
            told, state.up, state.error, state.refusal = state.error, False, why, refusal
            state.greeting, state.loading = None, False
            state.not_before = time.monotonic() + _PAUSE_S
            self._changed.notify_all()
        if told != why and not self._closed.is_set():
            log.warning("target worker %s is set aside: %s", state.name, why)


def _told(error: Any) -> Exception:
    """The worker's own exception, where it could travel."""
    told: Exception = error.cause if isinstance(error.cause, Exception) else error
    return told
