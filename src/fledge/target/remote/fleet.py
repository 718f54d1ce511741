"""The servers of one client: tracks which are up, picks the next one, waits while all are down.

A server that fails is set aside and polled; once it answers again with the same target, it is used
again. While all servers are down, the client waits, logs a warning, and gives up after `wait_s`.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.target.remote.http import Server, ServerBusy, ServerDown, ServerFault
from fledge.target.remote.protocol import identity
from fledge.target.remote.wire import WireError

log = logging.getLogger("fledge.remote")

T = TypeVar("T")
_CHECK_EVERY_S, _CHECK_TIMEOUT_S = 0.5, 5.0
_REMIND_S = 30.0


@dataclass
class ServerState:
    """The state of one server."""

    server: Server
    up: bool = False
    in_flight: int = 0  # this client's own requests
    queue: int = 0  # the server's own count, all clients included
    not_before: float = 0.0  # its queue was full: retry at this time
    error: str = "not asked yet"
    refused: bool = False  # it holds another target and is never used
    info: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Servers that hold the same target."""

    def __init__(self, servers: Sequence[Server], *, wait_s: float) -> None:
        if not servers:
            raise BadInput("no server to ask", where="urls")
        self._states = [ServerState(server) for server in servers]
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._identity: dict[str, Any] | None = None
        self._down_since: float | None = None
        self._reminded_at = 0.0
        self._rng = random.Random()  # not the global generator: runs must stay reproducible
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fledge-servers")

    def open(self) -> dict[str, Any]:
        """Compare the targets of all servers and return /v1/info; waits for one if all are down."""
        for state in self._states:
            self._check(state, first=True)
        self._watcher.start()
        return self.ask(lambda state: state.info)

    def ask(self, use: Callable[[ServerState], T]) -> T:
        """Call `use` with the server to ask next; its exceptions are passed to the caller."""
        state = self._take()
        try:
            answer = use(state)
        except ServerBusy as busy:
            state.not_before = time.monotonic() + busy.retry_after_s * self._rng.uniform(0.5, 1.0)
            raise
        except (ServerDown, ServerFault) as error:
            self._set_down(state, str(error))
            raise
        else:
            return answer
        finally:
            with self._changed:
                state.in_flight -= 1
                self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Sleep between two attempts; closing the client ends it."""
        self._closed.wait(seconds)

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for state in self._states:
            state.server.close()
        if self._watcher.is_alive():
            self._watcher.join(timeout=2 * _CHECK_TIMEOUT_S)

    def _take(self) -> ServerState:
        """The least loaded server that is up; waits until there is one."""
        with self._changed:
            while True:
                if self._closed.is_set():
                    raise RuntimeError("this RemoteEagle3TargetModel is closed: build a new one")
                now = time.monotonic()
                up = [state for state in self._states if state.up]
                ready = [state for state in up if state.not_before <= now]
                if ready:
                    state = min(ready, key=lambda s: (s.in_flight + s.queue, self._rng.random()))
                    state.in_flight += 1
                    self._down_since = None
                    return state
                if up:
                    pause = min(state.not_before for state in up) - now
                else:
                    pause = self._wait_left(now)
                self._changed.wait(min(pause, _CHECK_EVERY_S))

    def _wait_left(self, now: float) -> float:
        """How much longer to wait while all servers are down; warns now and then, and gives up by
        raising `TargetUnreachable`."""
        if self._down_since is None:
            self._down_since, self._reminded_at = now, -_REMIND_S
        waited = now - self._down_since
        why = ", ".join(f"{state.server.url}: {state.error}" for state in self._states)
        if waited >= self._wait_s or all(state.refused for state in self._states):
            raise TargetUnreachable(
                f"no target server answered for {waited:.0f} s ({why})",
                fix="start a server and run the same command again",
            )
        if waited - self._reminded_at >= _REMIND_S:
            self._reminded_at = waited
            log.warning(
                "no target server answers (%s); waiting, for another %.0f s at most",
                why,
                self._wait_s - waited,
            )
        return self._wait_s - waited

    def _watch(self) -> None:
        """Poll the servers until the client is closed, mainly to notice those that are back up."""
        while not self._closed.wait(_CHECK_EVERY_S * self._rng.uniform(0.8, 1.2)):
            for state in self._states:
                if not state.refused and not self._closed.is_set():
                    self._check(state)

    def _check(self, state: ServerState, *, first: bool = False) -> None:
        try:
            health = state.server.get_json("/health", timeout_s=_CHECK_TIMEOUT_S)
            state.queue = int(health.get("queue", 0))
            if not state.up:
                info = state.server.get_json("/v1/info", timeout_s=_CHECK_TIMEOUT_S)
                self._admit(state, info, first=first)
        except (ServerDown, ServerFault, ServerBusy, WireError, ValueError) as error:
            if first and isinstance(error, BadInput):  # a wrong token or address
                raise
            self._set_down(state, str(error))

    def _admit(self, state: ServerState, info: dict[str, Any], *, first: bool) -> None:
        """Use a server from now on if it holds the same target as the others."""
        actual = identity(info)
        with self._changed:
            if self._identity is None:
                self._identity = actual
            differing = [name for name, value in actual.items() if self._identity[name] != value]
            if differing:
                what = "; ".join(f"{n}: {actual[n]}, not {self._identity[n]}" for n in differing)
                state.refused, state.error = True, f"another target ({what})"
            else:
                if not first:
                    log.warning("target server %s is back", state.server.url)
                state.up, state.info, state.error = True, info, ""
            self._changed.notify_all()
        if state.refused:
            if first:
                raise BadInput(
                    f"holds another target than {self._states[0].server.url} ({what})",
                    where=state.server.url,
                    fix="all servers of a run must serve the same weights and aux layers",
                )
            log.warning("target server %s is not used: %s", state.server.url, state.error)

    def _set_down(self, state: ServerState, why: str) -> None:
        if self._closed.is_set():
            return
        with self._changed:
            was_up, state.up, state.error = state.up, False, why
            self._changed.notify_all()
        if was_up:
            log.warning("target server %s is set aside: %s", state.server.url, why)
