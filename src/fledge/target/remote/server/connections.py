"""Limits on connections, enforced when they are accepted, before anything is read from them.

A connection is *new* until its first request has arrived, then *busy* while a request is answered
and *idle* between requests. When there is no room for another, the one that has waited longest
without a request is closed, new ones before idle ones; requests in progress are never cut off. So
connections that are opened and abandoned (or never finish their TLS handshake) block nobody.
"""

import errno
import ipaddress
import logging
import math
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

log = logging.getLogger("fledge.remote")

KEEP_ALIVE_S = 120  # longer than trainers pause between requests
_SLACK_S = 5.0  # uvicorn should have closed an idle connection by then
_MAX_DROPS = 64  # connections refused or replaced before the event loop gets its turn
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REMIND_S = 60.0
_PAUSE_S = 0.05

Peer = tuple[str, int]


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of a server may hold open."""

    max_connections: int = 1024
    max_per_address: int = 64
    header_s: float = 10.0  # for a connection's first request, and for each request's head

    def below(self, files: int) -> "ConnectionLimits":
        """These limits, lowered so that half of the process's files remain for everything else."""
        limit = max(1, files // 2)
        if self.max_connections <= limit:
            return self
        log.warning(
            "at most %d connections, not %d: this process may open %d files (ulimit -n)",
            limit, self.max_connections, files,
        )  # fmt: skip
        return replace(self, max_connections=limit)


def raise_file_limit() -> int:
    """Raise this process's limit on open files to its maximum, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems grant less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Connection(socket.socket):
    """An accepted socket with its deadlines."""

    peer: Peer
    home: str  # connections with the same home are counted together; see `_home`
    due: float  # when it must have left its current state
    part_due: float = math.inf  # when the next part of an incoming message must be complete
    owner: "Connections | None" = None

    def close(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.forget(self)
        super().close()


class Connections:
    """All connections of one server. Used only on the event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits, self.dropped = limits, 0
        # each in the order in which connections entered the state
        self._new: dict[Peer, Connection] = {}
        self._busy: dict[Peer, Connection] = {}
        self._idle: dict[Peer, Connection] = {}
        self._count_by_home: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._new) + len(self._busy) + len(self._idle)

    def find(self, peer: Any) -> Connection | None:
        key = tuple(peer or ())[:2]
        return self._new.get(key) or self._busy.get(key) or self._idle.get(key)

    def add(self, connection: Connection) -> bool:
        """Admit a new connection, replacing an older one if need be; False if there is no room."""
        home = connection.home
        if self._count_by_home[home] >= self.limits.max_per_address:
            room = self._replace(home)
        else:
            room = len(self) < self.limits.max_connections or self._replace(None)
        if not room:
            self.dropped += 1
            return False
        connection.owner, connection.due = self, time.monotonic() + self.limits.header_s
        self._new[connection.peer] = connection
        self._count_by_home[home] += 1
        return True

    def forget(self, connection: Connection) -> None:
        """Stop counting a connection that is closed, or is about to be."""
        for state in (self._new, self._busy, self._idle):
            if state.get(connection.peer) is connection:
                del state[connection.peer]
                self._count_by_home[connection.home] -= 1
                if not self._count_by_home[connection.home]:
                    del self._count_by_home[connection.home]

    @contextmanager
    def busy(self, peer: Any) -> Iterator[None]:
        """Mark a connection as busy while a request of it is answered."""
        connection = self.find(peer)
        if connection is not None:
            self._move(connection, self._busy, math.inf)
        try:
            yield
        finally:
            if connection is not None and self.find(peer) is connection:
                self._move(connection, self._idle, time.monotonic() + KEEP_ALIVE_S + _SLACK_S)

    def drop_late(self) -> None:
        """Drop the connections whose time is up."""
        now = time.monotonic()
        all_connections = (*self._new.values(), *self._busy.values(), *self._idle.values())
        for connection in all_connections:
            if min(connection.due, connection.part_due) < now:
                self._drop(connection)

    def _move(self, connection: Connection, to: dict[Peer, Connection], due: float) -> None:
        for state in (self._new, self._busy, self._idle):
            state.pop(connection.peer, None)
        to[connection.peer], connection.due = connection, due

    def _replace(self, home: str | None) -> bool:
        """Drop the connection that has waited longest, of one home or of all."""
        for state in (self._new, self._idle):
            for connection in state.values():
                if home is None or connection.home == home:
                    self._drop(connection)
                    return True
        return False

    def _drop(self, connection: Connection) -> None:
        """Shut a connection down; the event loop then sees the end of stream and closes it."""
        self.forget(connection)
        self.dropped += 1
        with suppress(OSError):  # already closed
            connection.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """A listening socket that accepts only as many connections as its limits allow."""

    def __init__(self, family: int, limits: ConnectionLimits) -> None:
        # asyncio sets TCP_NODELAY only on sockets whose protocol is explicitly TCP
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections = Connections(limits)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._reminded_at, self._seen = -math.inf, 0

    def accept(self) -> tuple[Connection, Any]:
        """Accept like any non-blocking socket, but skip connections that are turned away."""
        while self.connections.dropped - self._seen < _MAX_DROPS:
            try:
                plain, address = super().accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._turn_away(error)
                break
            connection = Connection(self.family, self.type, self.proto, fileno=plain.detach())
            connection.peer, connection.home = address[:2], _home(address[0])
            if self.connections.add(connection):
                return connection, address
            connection.close()
        self._seen = self.connections.dropped
        raise BlockingIOError  # lets the event loop close the dropped connections and come back

    def close(self) -> None:
        super().close()
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def _turn_away(self, error: OSError) -> None:
        """Refuse a connection when the process is out of files: accept it with the spare descriptor
        and close it, or else the event loop would be woken for it again and again."""
        if time.monotonic() - self._reminded_at >= _REMIND_S:
            self._reminded_at = time.monotonic()
            log.warning(
                "connections are turned away: %s; raise the limit (ulimit -n) or lower "
                "--max-connections", (error.strerror or str(error)).lower(),
            )  # fmt: skip
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        try:
            super().accept()[0].close()
        except OSError:
            time.sleep(_PAUSE_S)  # not for lack of files: all that is left is to wait
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _home(host: str) -> str:
    """The IPv4 address, or the IPv6 /64 network: one machine may have all of its addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
