"""A client's connections to one target server: keep-alive, deadlines, complete replies.

Built on http.client, which can read a body directly into the memory that the tensors will use.
Every exchange has one deadline and ends in a complete reply or in an exception.
"""

import contextlib
import http.client
import json
import logging
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fledge.core.addresses import server_address
from fledge.core.errors import LONGEST_LINE, BadInput, first_line
from fledge.core.reading import OBJECT, Expected, parse_json
from fledge.target.finite_check import NotFinite
from fledge.target.remote.wire import CHUNK_BYTES, DIGEST_BYTES, WireError

log = logging.getLogger("fledge.remote")

_SMALL_BYTES = 1 << 20  # larger than any JSON reply
_CONNECT_S = 10.0


class ServerFault(Exception):  # noqa: N818  (a status, handled by the fleet)
    """The exchange failed (timeout, truncation, an error in the server): retry on another one."""


class ServerDown(ServerFault):
    """No server is listening; the request itself is not at fault."""


class ServerBusy(ServerFault):
    """The queue is full: retry later."""


class Refused(BadInput):
    """The server understood and refused the request; a retry would not help."""

    def __init__(self, what: str, *, status: int, where: str, fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.status = status


class Buffers:
    """Memory for replies, reused once nothing refers to it any more.

    Fresh memory costs a page fault every few kilobytes, about a third of the time that a reply
    takes on a fast link. Uses no locks: memory is returned by the garbage collector, which may run
    at any point.
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=keep)  # the oldest is dropped

    def lease(self, nbytes: int) -> memoryview:
        if nbytes < _SMALL_BYTES:
            return np.empty(nbytes, np.uint8).data
        try:
            base = self._free.pop()
        except IndexError:
            base = np.empty(0, np.uint8)
        if len(base) < nbytes:
            base = np.empty(nbytes, np.uint8)
        leased = base[:nbytes]
        weakref.finalize(leased, self._free.append, base)
        return leased.data


class Server:
    """Connections to one URL. Thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._buffers = buffers or Buffers(0)
        self._headers: dict[str, str] = {}
        self._locate(url, token)

    def _locate(self, url: str, token: str | None) -> None:
        parts = server_address(url)
        if parts.path not in ("", "/") or parts.query:
            raise BadInput("a server's address has no path", where=url)
        self.url, self._place = (
            f"{parts.scheme}://{parts.netloc}",
            (parts.hostname or "", parts.port),
        )
        if token is not None:
            check_token(token, where="token")
            self._headers["Authorization"] = f"Bearer {token}"

    def find(self) -> None:
        """Find out where a server is that may move; raises `ServerDown` while it is nowhere."""

    def get_json(
        self, path: str, expected: Expected = OBJECT, *, timeout_s: float
    ) -> dict[str, Any]:
        """A reply that is JSON, read as any metadata from an untrusted source is."""
        reply = bytes(self.exchange(path, None, timeout_s, _SMALL_BYTES, digest=False))
        value: dict[str, Any] = parse_json(reply, expected, where=self.url, what=f"its {path}")
        return value

    def close(self) -> None:
        """End all exchanges, and start no new ones."""
        self._closed = True
        self.abort()

    def abort(self) -> None:
        """Close idle connections and abort exchanges in progress."""
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # unlike closing, it wakes who is waiting
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def exchange(
        self,
        path: str,
        body: bytes | None,  # None: GET
        timeout_s: float,
        max_bytes: int,
        *,
        digest: bool = True,
    ) -> memoryview:
        """Send a request and return its reply, within `timeout_s`; by default checks the digest.
        Tensors may keep using the reply's memory."""
        deadline = time.monotonic() + timeout_s
        connection, whole = self._take(), False
        try:
            if connection.sock is None:
                self._connect(connection, timeout_s)
            connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
            connection.request("GET" if body is None else "POST", path, body, self._headers)
            status, reply = self._receive(connection, deadline, max_bytes, digest)
            whole = True
        except TimeoutError as error:
            raise ServerFault(f"no complete reply within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException, WireError) as error:
            raise ServerFault(first_line(error)) from error
        finally:
            self._release(connection, whole)
        if status != 200:
            raise self._error(status, bytes(reply))
        return reply

    def _take(self) -> HTTPConnection:
        """A connection that the server has not closed meanwhile, or a new one."""
        with self._lock:
            connection = None
            while self._idle and connection is None:
                connection, poll = self._idle.pop(), select.poll()
                poll.register(connection.sock, select.POLLIN)
                if poll.poll(0):  # nothing was asked: the end of the connection
                    connection.close()
                    connection = None
            if connection is None:
                kind = HTTPSConnection if self.url.startswith("https:") else HTTPConnection
                connection = kind(*self._place)
            self._busy.add(connection)
            return connection

    def _connect(self, connection: HTTPConnection, timeout_s: float) -> None:
        connection.timeout = min(_CONNECT_S, timeout_s)
        try:
            connection.connect()
        except ssl.SSLError as error:
            what = f"TLS failed ({first_line(error)})"
            fix = "SSL_CERT_FILE may name a bundle of certificates to trust"
            raise Refused(what, status=0, where=self.url, fix=fix) from error
        except OSError as error:
            raise ServerDown(first_line(error)) from error
        if self._closed:
            raise ServerDown("this client is closed")

    def _release(self, connection: HTTPConnection, whole: bool) -> None:
        """Keep a connection after a whole exchange, unless either side closed it meanwhile."""
        with self._lock:
            self._busy.discard(connection)
            if whole and not self._closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def _receive(
        self, connection: HTTPConnection, deadline: float, max_bytes: int, digest: bool
    ) -> tuple[int, memoryview]:
        """The reply's status and body, which is hashed piece by piece as it arrives."""
        sock, response = connection.sock, connection.getresponse()
        length = response.length
        if length is None or length > max(max_bytes, _SMALL_BYTES):
            raise WireError(f"a reply of {length} bytes, at most {max_bytes} were expected")
        view, hashed, at = self._buffers.lease(length), xxhash.xxh3_64(), 0
        while at < length:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            count = response.readinto(view[at : at + CHUNK_BYTES])
            if not count:
                raise WireError(f"the reply ended after {at} of {length} bytes")
            hashed.update(view[at : max(at, min(at + count, length - DIGEST_BYTES))])
            at += count
        response.close()
        expected = hashed.digest()[::-1]
        if digest and response.status == 200 and bytes(view[-DIGEST_BYTES:]) != expected:
            raise WireError("the digest does not fit: bytes were lost or changed on the way")
        return response.status, view

    def _error(self, status: int, body: bytes) -> Exception:
        """The exception that corresponds to an error reply."""
        try:
            reply = dict(json.loads(body))
        except (ValueError, TypeError, RecursionError):  # a proxy's page
            reply = {}
        detail = reply.get("error")  # a string, or in OpenAI's API an object with a message
        detail = detail.get("message") if isinstance(detail, dict) else detail
        what = str(detail)[:LONGEST_LINE] if detail else f"HTTP {status}"
        if status == 429:
            return ServerBusy(what)
        if status >= 500:
            final = reply.get("final")
            return NotFinite(what, where=self.url) if final else ServerFault(f"{status}: {what}")
        fix = {401: "see target.token_env", 409: "all servers must hold the same weights"}
        return Refused(what, status=status, where=self.url, fix=fix.get(status, ""))


def check_token(token: str, *, where: str) -> None:
    """Refuse a token that cannot be sent in a header: it must be printable ASCII without spaces."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise BadInput(
            "not a token that can be sent: it is empty, or has blanks, control characters or "
            "letters beyond ASCII",
            where=where,
            fix="openssl rand -hex 32 makes a good one",
        )
