"""Who may be connected: counted where connections are accepted, before anything is read of them.

A connection is *new* until its first request has come in, then *busy* while a request is answered
and *idle* between two. Where there is no room for another, the one that has waited longest without
asking anything makes place, new ones before idle ones; requests at work are never cut off. So
connections that are opened and left (or that never finish their TLS handshake) keep nobody out.
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
_SLACK_S = 5.0  # whoever closes idle connections should have done so by then
_AT_ONCE = 64  # connections turned away or replaced before the event loop gets its turn
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REMIND_S = 60.0
_PAUSE_S = 0.05

Peer = tuple[str, int]


@dataclass(frozen=True)
class ConnectionLimits:
    """What strangers may hold of a server."""

    max_connections: int = 1024
    max_per_address: int = 64
    header_s: float = 10.0  # for a connection's first request to arrive, and for each head

    def below(self, files: int) -> "ConnectionLimits":
        """So few connections that half of the process's files are left for everything else."""
        most = max(1, files // 2)
        if self.max_connections <= most:
            return self
        log.warning(
            "at most %d connections, not %d: this process may open %d files (ulimit -n)",
            most, self.max_connections, files,
        )  # fmt: skip
        return replace(self, max_connections=most)


def raise_file_limit() -> int:
    """Let this process open as many files as it may at most; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems promise more than they grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Connection(socket.socket):
    """An accepted socket, and when it must have gone on."""

    peer: Peer
    home: str  # what is counted together
    due: float  # in the state it is in
    part_due: float = math.inf  # of the message that is coming in
    owner: "Connections | None" = None

    def close(self) -> None:
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.forget(self)
        super().close()


class Connections:
    """All connections of one server. Everything happens on the event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits, self.dropped = limits, 0
        # in the order in which they came into this state
        self._new: dict[Peer, Connection] = {}
        self._busy: dict[Peer, Connection] = {}
        self._idle: dict[Peer, Connection] = {}
        self._at_home: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._new) + len(self._busy) + len(self._idle)

    def find(self, peer: Any) -> Connection | None:
        key = tuple(peer or ())[:2]
        return self._new.get(key) or self._busy.get(key) or self._idle.get(key)

    def add(self, connection: Connection) -> bool:
        """Count a new connection, instead of an older one if need be; False: there is no room."""
        home = connection.home
        if self._at_home[home] >= self.limits.max_per_address:
            room = self._replace(home)
        else:
            room = len(self) < self.limits.max_connections or self._replace(None)
        if not room:
            self.dropped += 1
            return False
        connection.owner, connection.due = self, time.monotonic() + self.limits.header_s
        self._new[connection.peer] = connection
        self._at_home[home] += 1
        return True

    def forget(self, connection: Connection) -> None:
        """It is closed, or will be soon."""
        for state in (self._new, self._busy, self._idle):
            if state.get(connection.peer) is connection:
                del state[connection.peer]
                self._at_home[connection.home] -= 1
                if not self._at_home[connection.home]:
                    del self._at_home[connection.home]

    @contextmanager
    def busy(self, peer: Any) -> Iterator[None]:
        """While a request of this connection is answered."""
        connection = self.find(peer)
        if connection is not None:
            self._move(connection, self._busy, math.inf)
        try:
            yield
        finally:
            if connection is not None and self.find(peer) is connection:
                self._move(connection, self._idle, time.monotonic() + KEEP_ALIVE_S + _SLACK_S)

    def drop_late(self) -> None:
        """Send away whoever had time enough."""
        now = time.monotonic()
        everybody = (*self._new.values(), *self._busy.values(), *self._idle.values())
        for connection in everybody:
            if min(connection.due, connection.part_due) < now:
                self._drop(connection)

    def _move(self, connection: Connection, to: dict[Peer, Connection], due: float) -> None:
        for state in (self._new, self._busy, self._idle):
            state.pop(connection.peer, None)
        to[connection.peer], connection.due = connection, due

    def _replace(self, home: str | None) -> bool:
        """Send away the connection that has waited longest, of one address or of all."""
        for state in (self._new, self._idle):
            for connection in state.values():
                if home is None or connection.home == home:
                    self._drop(connection)
                    return True
        return False

    def _drop(self, connection: Connection) -> None:
        """The event loop sees the end of the stream and closes the socket itself."""
        self.forget(connection)
        self.dropped += 1
        with suppress(OSError):  # it is gone already
            connection.shutdown(socket.SHUT_RDWR)


class Listener(socket.socket):
    """A listening socket that lets in only as many connections as its limits allow."""

    def __init__(self, family: int, limits: ConnectionLimits) -> None:
        # named as TCP: asyncio sends small packets at once only where it can tell
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections = Connections(limits)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._reminded, self._seen = -math.inf, 0

    def accept(self) -> tuple[Connection, Any]:
        """As of any socket that does not block, except for those that are turned away."""
        while self.connections.dropped - self._seen < _AT_ONCE:
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
        raise BlockingIOError  # for now: the event loop closes what was sent away and comes back

    def close(self) -> None:
        super().close()
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def _turn_away(self, error: OSError) -> None:
        """No file is left for another connection: take it with the spare one and close it, or the
        event loop would be told of it again and again."""
        if time.monotonic() - self._reminded >= _REMIND_S:
            self._reminded = time.monotonic()
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
            time.sleep(_PAUSE_S)  # not for lack of files: nothing can be done but wait
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _home(host: str) -> str:
    """An address; of IPv6 the network, of which one machine may have every address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
