"""Limits on connections: how many there may be, how long a request may take to arrive, and how much
it may contain besides its body.

A connection counts from the moment it is accepted, before anything is read from it. When there is
no room for another, the one that has waited longest is closed, those that never sent a request
first; requests in progress are never cut off. So connections that are opened and abandoned (or
never finish their TLS handshake) block nobody.
"""

import ipaddress
import logging
import math
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("fledge.remote")

KEEP_ALIVE_S = 120  # longer than trainers pause between requests
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
_SLACK_S = 5.0  # uvicorn should have closed an idle connection by then
_BODY_S = 90.0  # for any body, even one that no route reads; the routes have shorter limits
_MAX_DROPS = 64  # connections refused or replaced before the event loop gets its turn
_MAX_PIPELINED = 4  # requests sent before the reply to an earlier one
_TOO_LARGE_REPLY = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)

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
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems grant less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Connection(socket.socket):
    """An accepted socket with its deadlines."""

    peer: Peer
    home: str  # connections with the same home are counted together; see `_home`
    due: float  # when its next request must have begun
    part_due: float = math.inf  # when the next part of an incoming message must be complete
    waits_since: float
    has_asked = False
    busy = False  # a request of it is being answered
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
        self._all: dict[Peer, Connection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def find(self, peer: Any) -> Connection | None:
        return self._all.get(tuple(peer or ())[:2])

    def add(self, connection: Connection) -> bool:
        """Admit a new connection, replacing an older one if need be; False if there is no room."""
        everyone = list(self._all.values())
        neighbours = [other for other in everyone if other.home == connection.home]
        if len(neighbours) >= self.limits.max_per_address:
            room = self._replace(neighbours)
        else:
            room = len(everyone) < self.limits.max_connections or self._replace(everyone)
        if not room:
            self.dropped += 1
            return False
        connection.owner, connection.waits_since = self, time.monotonic()
        connection.due = connection.waits_since + self.limits.header_s
        self._all[connection.peer] = connection
        return True

    def forget(self, connection: Connection) -> None:
        """Stop counting a connection that is closed, or is about to be."""
        if self.find(connection.peer) is connection:
            del self._all[connection.peer]

    @contextmanager
    def busy(self, peer: Any) -> Iterator[None]:
        """Mark a connection as busy while a request of it is answered."""
        connection = self.find(peer)
        if connection is None:
            yield
            return
        connection.busy, connection.has_asked, connection.due = True, True, math.inf
        try:
            yield
        finally:
            connection.busy, connection.waits_since = False, time.monotonic()
            connection.due = connection.waits_since + KEEP_ALIVE_S + _SLACK_S

    def drop_late(self) -> None:
        """Drop the connections whose time is up."""
        now = time.monotonic()
        for connection in list(self._all.values()):
            if min(connection.due, connection.part_due) < now:
                self._drop(connection)

    def _replace(self, candidates: list[Connection]) -> bool:
        """Drop the connection that has waited longest; False if all are busy."""
        waiting = [connection for connection in candidates if not connection.busy]
        if waiting:
            self._drop(min(waiting, key=lambda other: (other.has_asked, other.waits_since)))
        return bool(waiting)

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
        self.connections, self._seen = Connections(limits), 0

    def accept(self) -> tuple[Connection, Any]:
        """Accept like any non-blocking socket, but skip connections that are turned away."""
        while self.connections.dropped - self._seen < _MAX_DROPS:
            plain, address = super().accept()
            connection = Connection(self.family, self.type, self.proto, fileno=plain.detach())
            connection.peer, connection.home = address[:2], _home(address[0])
            if self.connections.add(connection):
                return connection, address
            connection.close()
        self._seen = self.connections.dropped
        raise BlockingIOError  # lets the event loop close the dropped connections and come back


def _home(host: str) -> str:
    """The IPv4 address, or the IPv6 /64 network: one machine may have all of its addresses."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class _TooMuch(Exception):  # noqa: N818  (ends the parsing, not an error of ours)
    """Too many headers, or too many requests at once."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on a request's head, of which it has none. The parser buffers
    an unfinished name, value or target, and uvicorn all headers, so the bytes outside of bodies
    (request line, headers, trailers, the framing of chunks) are counted as they arrive."""

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._connection: Connection | None = None
        self._left = MAX_HEAD_BYTES  # for bytes outside of bodies

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connection = self._connections.find(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        super().data_received(data)
        if self._left < 0 and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.abort()
            raise _TooMuch
        self._set_due(self._connections.limits.header_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse()
            raise _TooMuch

    def on_headers_complete(self) -> None:
        self._set_due(_BODY_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # twice: a chunk's framing may be as long as the chunk itself, and must not count
        self._left = min(MAX_HEAD_BYTES, self._left + 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._left = MAX_HEAD_BYTES
        self._set_due(math.inf)
        super().on_message_complete()

    def _set_due(self, seconds: float) -> None:
        """Set the time within which the next part of the message must be complete."""
        if self._connection is not None:
            self._connection.part_due = time.monotonic() + seconds

    def _refuse(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # not in the middle of a reply
            self.transport.write(_TOO_LARGE_REPLY)
        self.transport.close()
