"""The servers of one client: tracks which are up, picks the next one, waits while all are down.

A server that fails is set aside and polled; once it answers again with the same target, it is used
again. While all servers are down, the client waits, and gives up after `wait_s`.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fledge.core.errors import BadInput, TargetUnreachable, first_line
from fledge.core.reading import Table, Whole
from fledge.core.terminal import counted
from fledge.target.remote.http import Server, ServerBusy, ServerDown, ServerFault, log
from fledge.target.remote.protocol import IDENTITY, INFO
from fledge.target.remote.wire import WireError

T = TypeVar("T")
_CHECK_EVERY_S, _CHECK_TIMEOUT_S = 0.5, 5.0
_BUSY_S = 0.2  # before a server whose queue was full is asked again
_HEALTH = Table({"queue": Whole()})


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
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fledge-servers")

    def open(self) -> dict[str, Any]:
        """Compare the targets of all servers and return /v1/info; waits for one if all are down."""
        for state in self._states:
            self._check(state, first=True)
        self._watcher.start()
        return self.ask(lambda state, _: state.info)

    def ask(self, use: Callable[[ServerState, float], T], *, prefer: int | None = None) -> T:
        """The answer of `use`, which is called with the server to ask next and the seconds that it
        may take, until one gives a complete answer. An attempt may take half of the time that is
        left, so that there is some for another, and the last one all of it. `prefer` is the number
        of the server to ask if it is up."""
        deadline, failures = time.monotonic() + self._timeout_s, 0
        while True:
            state, down_s = self._take(deadline, prefer)
            deadline += down_s
            left_s = deadline - time.monotonic()
            try:
                return use(state, left_s if failures == self._retries else left_s / 2)
            except ServerBusy as busy:
                state.not_before, state.error = time.monotonic() + _BUSY_S, str(busy)
            except ServerDown as error:
                self._set_down(state, str(error))
            except (ServerFault, WireError) as error:
                failures += 1
                self._set_down(state, first_line(error))
                if failures > self._retries:
                    raise TargetUnreachable(
                        f"{counted(failures, 'attempt')} at one request failed, the last with: "
                        f"{first_line(error)}",
                        fix="look at the servers' logs and run the same command again",
                    ) from error
            finally:
                with self._changed:
                    state.in_flight -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        for state in self._states:
            state.server.close()
        if self._watcher.is_alive():
            self._watcher.join(timeout=2 * _CHECK_TIMEOUT_S)

    def _take(self, deadline: float, prefer: int | None = None) -> tuple[ServerState, float]:
        """The least loaded server that is up and not busy, and of several the one that was asked
        the longest time ago; waits until there is one. Also returns for how long none was up, which
        does not count as time of the request."""
        down_s = 0.0
        with self._changed:
            while not (ready := self._ready()):
                begin, down = time.monotonic(), not any(state.up for state in self._states)
                if down and not down_s:
                    what = "no target server answers (%s); waiting, for %g s at most"
                    log.warning(what, self._why(), self._wait_s)
                if down and down_s >= self._wait_s:
                    what = f"no target server answered for {down_s:.0f} s ({self._why()})"
                    raise TargetUnreachable(what, fix="start one, and run the same command again")
                if not down and begin >= deadline + down_s:
                    what = f"no answer within {self._timeout_s:g} s ({self._why()})"
                    raise TargetUnreachable(what, where="target.timeout_s")
                self._changed.wait(_BUSY_S)
                down_s += (time.monotonic() - begin) * down
            state = min(ready, key=lambda s: (s.in_flight + s.queue, s.asked))
            if prefer is not None:
                preferred = self._states[prefer % len(self._states)]
                state = preferred if preferred in ready else ready[prefer % len(ready)]
            state.in_flight += 1
            state.asked = next(self._turns)
            return state, down_s

    def _ready(self) -> list[ServerState]:
        if self._closed.is_set():
            raise RuntimeError("this RemoteEagle3TargetModel is closed: build a new one")
        now = time.monotonic()
        return [state for state in self._states if state.up and state.not_before <= now]

    def _why(self) -> str:
        return ", ".join(f"{state.server.url}: {state.error}" for state in self._states)

    def _watch(self) -> None:
        """Poll the servers until the client is closed, mainly to notice those that are back up."""
        while not self._closed.wait(_CHECK_EVERY_S):
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
        except ServerFault as error:
            self._set_down(state, str(error))
        except BadInput as error:  # a wrong token, another target, or not a target server
            if first:
                raise
            if str(error) != state.error:
                log.warning("target server %s cannot be used: %s", state.server.url, error)
            self._set_down(state, str(error))

    def _admit(self, state: ServerState, info: dict[str, Any]) -> None:
        """Use a server from now on if it holds the same target as the others."""
        actual = {name: info[name] for name in IDENTITY}
        with self._changed:
            expected = self._identity = self._identity or actual
            differing = [name for name in IDENTITY if expected[name] != actual[name]]
            if differing:
                what = "; ".join(f"{n}: {actual[n]}, not {expected[n]}" for n in differing)
                raise BadInput(
                    f"holds another target than the other servers ({what})",
                    where=state.server.url,
                    fix="all servers of a run must serve the same weights and aux layers",
                )
            if state.info:
                log.warning("target server %s is back", state.server.url)
            state.up, state.info, state.error = True, info, ""
            self._changed.notify_all()

    def _set_down(self, state: ServerState, why: str) -> None:
        if self._closed.is_set():
            return
        with self._changed:
            was_up, state.up, state.error = state.up, False, why
            self._changed.notify_all()
        if was_up:
            log.warning("target server %s is set aside: %s", state.server.url, why)
