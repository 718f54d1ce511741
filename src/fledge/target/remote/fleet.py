"""The servers of one client: tracks which are up, picks the next one, waits while all are down.

A server that fails is set aside and polled; once it answers again with the same target, it is used
again. While all servers are down, the client waits, logs a warning, and gives up after `wait_s`.
"""

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fledge.core.errors import BadInput, TargetUnreachable, first_line
from fledge.core.reading import Table, Whole
from fledge.core.terminal import counted
from fledge.target.remote.http import (
    Server,
    ServerBusy,
    ServerDown,
    ServerFault,
    ServerUnfit,
    log,
)
from fledge.target.remote.protocol import IDENTITY, INFO
from fledge.target.remote.wire import WireError

T = TypeVar("T")
REMIND_S = 30.0  # between two words about a wait
_CHECK_EVERY_S, _CHECK_TIMEOUT_S = 0.5, 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0  # between two attempts
_HEALTH = Table({"queue": Whole()})


class Deadline:
    """When one request must be answered, over all its attempts. It stands still while no server is
    up, for which `wait_s` is the limit."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.end = timeout_s, time.monotonic() + timeout_s

    def left(self) -> float:
        return self.end - time.monotonic()


@dataclass(eq=False)
class ServerState:
    """The state of one server."""

    server: Server
    asked: int  # sequence number of this client's last request to it
    up: bool = False
    in_flight: int = 0  # this client's own requests
    queue: int = 0  # the server's own count, all clients included
    not_before: float = 0.0  # its queue was full: retry at this time
    error: str = "not asked yet"
    refusal: BadInput | None = None  # why it cannot be used although it runs
    info: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Servers that hold the same target."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        timeout_s: float,
        wait_s: float,
        retries: int = 0,
        rank: int = 0,
    ) -> None:
        if not servers:
            raise BadInput("no server to ask", where="urls")
        # Ranks start at different servers: the first request of each would go to the same one.
        count = len(servers)
        self._states = [
            ServerState(server, asked=(index - rank) % count - count)
            for index, server in enumerate(servers)
        ]
        self._turns = itertools.count()
        self._timeout_s, self._wait_s, self._retries = timeout_s, wait_s, retries
        self._changed = threading.Condition()
        self._identity: dict[str, Any] | None = None
        self._down_since: float | None = None  # all servers, without an answer since
        self._reminded_at = -math.inf
        self._rng = random.Random()  # not the global generator: runs must stay reproducible
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fledge-servers")

    def open(self) -> dict[str, Any]:
        """Compare the targets of all servers and return /v1/info; waits for one if all are down."""
        for state in self._states:
            self._check(state, first=not state.server.moves)
        self._watcher.start()
        return self.ask(lambda state, _: state.info)

    def ask(self, use: Callable[[ServerState, float], T], *, prefer: int | None = None) -> T:
        """The answer of `use`, which is called with the server to ask next and the seconds that it
        may take, until one gives a complete answer. An attempt may take half of the time that is
        left, so that there is some for another, and the last one all of it. `prefer` is the number
        of the server to ask if it is up."""
        deadline, failures, pause = Deadline(self._timeout_s), 0, _FIRST_PAUSE_S
        while True:
            state, failed = self._take(deadline, prefer), False
            try:
                answer = use(state, deadline.left() / (1 if failures == self._retries else 2))
                self._down_since = None
                return answer
            except ServerBusy as busy:
                pause_s = busy.retry_after_s * self._rng.uniform(0.5, 1.0)
                state.not_before, state.error = time.monotonic() + pause_s, str(busy)
            except ServerDown as error:
                self._set_down(state, str(error))
            except (ServerFault, WireError) as error:
                failures, failed = failures + 1, True
                self._set_down(state, first_line(error))
                if failures > self._retries or deadline.left() <= pause:
                    raise TargetUnreachable(
                        f"{counted(failures, 'attempt')} at one request failed, within the "
                        f"{self._timeout_s:g} s of target.timeout_s, the last with: "
                        f"{first_line(error)}",
                        fix="look at the servers' logs and run the same command again",
                    ) from error
            finally:
                with self._changed:
                    state.in_flight -= 1
                    self._changed.notify_all()
            if failed:
                self._closed.wait(pause)  # closing the client ends it
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for state in self._states:
            state.server.close()
        if self._watcher.is_alive():
            self._watcher.join(timeout=2 * _CHECK_TIMEOUT_S)

    def _take(self, deadline: Deadline, prefer: int | None = None) -> ServerState:
        """The least loaded server that is up and not busy, and of several the one that was asked
        the longest time ago; waits until there is one."""
        with self._changed:
            while True:
                if self._closed.is_set():
                    raise RuntimeError("this RemoteEagle3TargetModel is closed: build a new one")
                now = time.monotonic()
                up = [state for state in self._states if state.up]
                left_s = deadline.left() if up else self._wait_left(now)
                if up and left_s <= 0:
                    raise TargetUnreachable(
                        f"no answer within {deadline.timeout_s:g} s ({self._why()})",
                        where="target.timeout_s",
                    )
                if ready := [state for state in up if state.not_before <= now]:
                    state = min(ready, key=lambda s: (s.in_flight + s.queue, s.asked))
                    if prefer is not None:
                        preferred = self._states[prefer % len(self._states)]
                        state = preferred if preferred in ready else ready[prefer % len(ready)]
                    state.in_flight += 1
                    state.asked = next(self._turns)
                    return state
                if up and deadline.timeout_s - left_s >= REMIND_S:
                    self._remind("all target servers are busy", left_s)
                pauses = (left_s, _CHECK_EVERY_S, *(state.not_before - now for state in up))
                self._changed.wait(min(pauses))
                if not up:
                    deadline.end += time.monotonic() - now

    def _why(self) -> str:
        return ", ".join(f"{state.server.url}: {state.error}" for state in self._states)

    def _remind(self, what: str, left_s: float) -> None:
        """Say now and then what is waited for."""
        if (now := time.monotonic()) - self._reminded_at >= REMIND_S:
            self._reminded_at = now
            log.warning("%s (%s); waiting, for another %.0f s at most", what, self._why(), left_s)

    def _wait_left(self, now: float) -> float:
        """How much longer to wait while all servers are down; raises `TargetUnreachable` in the
        end."""
        if self._down_since is None:
            self._down_since, self._reminded_at = now, -math.inf
        if any(state.server.loading for state in self._states):
            self._down_since = self._reminded_at = now
        left_s = self._down_since + self._wait_s - now
        refusals = [state.refusal for state in self._states if state.refusal is not None]
        if len(refusals) == len(self._states):
            first = refusals[0]
            raise TargetUnreachable(first.what, where=first.where, fix=first.fix)
        if left_s <= 0:
            raise TargetUnreachable(
                f"no target server answered for {now - self._down_since:.0f} s ({self._why()})",
                fix="start one, and run the same command again",
            )
        self._remind("no target server answers", left_s)
        return left_s

    def _watch(self) -> None:
        """Poll the servers until the client is closed, mainly to notice those that are back up."""
        while not self._closed.wait(_CHECK_EVERY_S * self._rng.uniform(0.8, 1.2)):
            for state in self._states:
                if not self._closed.is_set():
                    self._check(state)

    def _check(self, state: ServerState, *, first: bool = False) -> None:
        timeout_s = min(_CHECK_TIMEOUT_S, self._timeout_s)
        try:
            if not state.up:
                state.server.find()
            health = state.server.get_json("/health", _HEALTH, timeout_s=timeout_s)
            state.queue = health["queue"]
            if not state.up:
                self._admit(state, state.server.get_json("/v1/info", INFO, timeout_s=timeout_s))
        except ServerUnfit as unfit:
            if first:
                raise unfit.error from None
            self._set_down(state, str(unfit), refusal=unfit.error)
        except (ServerDown, ServerFault, ServerBusy, BadInput) as error:
            if first and isinstance(error, BadInput):  # a wrong token, or not a target server
                raise
            self._set_down(state, str(error))

    def _admit(self, state: ServerState, info: dict[str, Any]) -> None:
        """Use a server from now on if it holds the same target as the others."""
        actual = {name: info[name] for name in IDENTITY}
        with self._changed:
            expected = self._identity = self._identity or actual
            differing = [name for name in IDENTITY if expected[name] != actual[name]]
            if differing:
                what = "; ".join(f"{n}: {actual[n]}, not {expected[n]}" for n in differing)
                raise ServerUnfit(
                    BadInput(
                        f"holds another target than the other servers ({what})",
                        where=state.server.url,
                        fix="all servers of a run must serve the same weights and aux layers",
                    )
                )
            if state.info:
                log.warning("target server %s is back", state.server.url)
            state.up, state.info, state.error, state.refusal = True, info, "", None
            self._changed.notify_all()

    def _set_down(self, state: ServerState, why: str, refusal: BadInput | None = None) -> None:
        if self._closed.is_set():
            return
        with self._changed:
            news = state.up or (refusal is not None and state.error != why)
            state.up, state.error, state.refusal = False, why, refusal
            self._changed.notify_all()
        if news:
            log.warning("target server %s is set aside: %s", state.server.url, why)
