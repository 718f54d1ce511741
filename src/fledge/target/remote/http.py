"""A client's connections to one target server: keep-alive, deadlines, complete replies.

Built on http.client, which can read a body directly into the memory that the tensors will use.
Every exchange has one deadline and ends in a complete reply or in an exception.
"""

import contextlib
import http.client
import logging
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.core.addresses import server_address
from fledge.core.errors import LONGEST_LINE, BadInput, first_line
from fledge.core.reading import OBJECT, Expected, Flag, Number, Table, parse_json
from fledge.target.finite_check import NotFinite
from fledge.target.remote.wire import CHUNK_BYTES, DigestCheck, WireError

log = logging.getLogger("fledge.remote")

_SMALL_BYTES = 1 << 20  # larger than any JSON reply
_CONNECT_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 60.0  # whatever a busy server asks for
_ERROR = Table(optional={"retry_after_s": Number(), "final": Flag()})
_HUNG_UP = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class ServerDown(Exception):  # noqa: N818  (a status, handled by the fleet)
    """No server is listening; the request itself is not at fault."""


class ServerUnfit(Exception):  # noqa: N818  (a status too)
    """The server runs and cannot be used, for the reason in `error`."""

    def __init__(self, error: BadInput) -> None:
        super().__init__(str(error))
        self.error = error


class ServerFault(Exception):  # noqa: N818  (a status too)
    """The exchange failed (timeout, truncation, an error in the server): retry on another one."""


class ServerBusy(Exception):  # noqa: N818  (a status too)
    """The queue is full: retry after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"busy for another {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class Refused(BadInput):
    """The server understood and refused the request; a retry would not help."""

    def __init__(self, what: str, *, status: int, where: str, fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.status = status


@dataclass(frozen=True)
class Reply:
    body: memoryview  # writable; tensors may keep using it
    queue: int  # requests waiting at the server


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


class _Deadline:
    """The end of one exchange's time, at which its connection is shut down: whatever the exchange
    waits for then ends."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._end = timeout_s, time.monotonic() + timeout_s
        self.awaited = "a connection"
        self.passed = ""  # once it has: what was awaited then

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @contextlib.contextmanager
    def watch(self, connection: HTTPConnection) -> Iterator[None]:
        def end() -> None:
            self.passed = (
                f"no whole reply within {self._timeout_s:.3g} s, still waiting for {self.awaited}"
            )
            _hang_up(connection)

        timer = threading.Timer(self.left(), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _hang_up(connection: HTTPConnection) -> None:
    """Shut a connection down, also while another thread waits for it."""
    if (sock := connection.sock) is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Server:
    """Connections to one URL. Thread-safe."""

    moves = False  # whether it may come up at another address, whatever is wrong with it now
    loading = False  # whether it is being started, which may take minutes

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        buffers: Buffers | None = None,
        content_type: str | None = None,
    ) -> None:
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._buffers = buffers or Buffers(0)
        self._headers = {} if content_type is None else {"Content-Type": content_type}
        self._locate(url, token)
        self._tls = _tls_context(ca_file) if url.startswith("https:") else None

    def _locate(self, url: str, token: str | None) -> None:
        parts = server_address(url)
        assert parts.hostname is not None
        if parts.path not in ("", "/") or parts.query:
            raise BadInput("a server's address has no path", where=url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port
        if token is not None:
            check_token(token, where="token")
            self._headers["Authorization"] = f"Bearer {token}"

    def find(self) -> None:
        """Find out where a server is that may move; raises `ServerDown` while it is nowhere."""

    def get_json(
        self, path: str, expected: Expected = OBJECT, *, body: bytes | None = None, timeout_s: float
    ) -> dict[str, Any]:
        """A reply that is JSON, read as any metadata from an untrusted source is."""
        reply = bytes(self.exchange(path, body, timeout_s, _SMALL_BYTES, digest=False).body)
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
                _hang_up(connection)
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
    ) -> Reply:
        """Send a request and return its reply, within `timeout_s`; by default checks the digest."""
        deadline = _Deadline(timeout_s)
        while True:
            connection, reused = self._take(deadline.left())
            whole = False
            try:
                if not reused:
                    self._open(connection)
                with deadline.watch(connection):
                    deadline.awaited = "room to send the request"
                    method = "GET" if body is None else "POST"
                    connection.request(method, path, body, self._headers)
                    reply = self._receive(connection, deadline, max_bytes, digest)
                whole = True
                return reply
            except (OSError, http.client.HTTPException, WireError) as error:
                if deadline.passed:
                    raise ServerFault(deadline.passed) from error
                if not isinstance(error, _HUNG_UP):
                    raise ServerFault(first_line(error)) from error
                if not reused:  # else the server had closed it in the meantime: take another one
                    what = f"closed the connection ({first_line(error)})"
                    raise ServerFault(what) from error
            finally:
                self._release(connection, whole)

    def _take(self, left_s: float) -> tuple[HTTPConnection, bool]:
        """(connection, whether it is a reused one)."""
        kind = HTTPConnection if self._tls is None else partial(HTTPSConnection, context=self._tls)
        with self._lock:
            reused = bool(self._idle)
            if reused:
                connection = self._idle.pop()
            else:
                timeout_s = max(0.001, min(_CONNECT_S, left_s))
                connection = kind(self._host, self._port, timeout=timeout_s)
            self._busy.add(connection)
        return connection, reused

    def _open(self, connection: HTTPConnection) -> None:
        connection.auto_open = 0  # once it is closed, another one takes its place
        try:
            connection.connect()
        except ssl.SSLError as error:
            what = f"TLS failed ({first_line(error)})"
            raise Refused(what, status=0, where=self.url, fix="see target.ca_file") from error
        except OSError as error:
            raise ServerDown(first_line(error)) from error
        connection.sock.settimeout(None)  # the deadline ends all waiting
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
        self, connection: HTTPConnection, deadline: _Deadline, max_bytes: int, digest: bool
    ) -> Reply:
        deadline.awaited = "the headers of its reply"
        response = connection.getresponse()
        length = response.length
        if length is None or length > max(max_bytes, _SMALL_BYTES):
            size = "unknown length" if length is None else f"{length} bytes"
            raise WireError(f"a reply of {size}, at most {max_bytes} bytes were expected")
        try:
            view = self._buffers.lease(length)
        except MemoryError:
            raise WireError(f"a reply of {length} bytes, which no memory is left for") from None
        check = DigestCheck(length) if digest and response.status == 200 else None
        at = 0
        while at < length:
            deadline.awaited = f"the rest of its reply, after {at} of {length} bytes"
            count = response.fp.readinto1(view[at : at + CHUNK_BYTES])
            if not count:
                raise WireError(f"the reply ended after {at} of {length} bytes")
            if check is not None:
                check.update(view[at : at + count])
            at += count
        status, headers = response.status, response.headers
        response.close()
        if check is not None:
            check.finish(view)
        if status != 200:
            self._raise_error(status, bytes(view), headers)
        queue = headers.get("X-Fledge-Queue", "")
        return Reply(view, int(queue) if queue.isdecimal() and len(queue) < 10 else 0)

    def _raise_error(self, status: int, body: bytes, headers: http.client.HTTPMessage) -> None:
        """Raise the exception that corresponds to an error reply."""
        try:
            reply = parse_json(body, _ERROR, where=self.url)
        except BadInput:  # a proxy's page, or nonsense
            reply = {}
        detail = reply.get("error")  # a string, or in OpenAI's API an object with a message
        detail = detail.get("message") if isinstance(detail, dict) else detail
        what = detail[:LONGEST_LINE] if isinstance(detail, str) else f"HTTP {status}"
        if status == 429:
            raise ServerBusy(_seconds(reply.get("retry_after_s", headers.get("Retry-After"))))
        if status >= 500 and reply.get("final"):
            raise NotFinite(what, where=self.url)
        if status >= 500:
            raise ServerFault(f"HTTP {status}: {what}")
        fix = {401: "see target.token_env", 409: "all servers must hold the same weights"}
        raise Refused(what, status=status, where=self.url, fix=fix.get(status, ""))


def check_token(token: str, *, where: str) -> None:
    """Refuse a token that cannot be sent in a header: it must be printable ASCII without spaces."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise BadInput(
            "not a token that can be sent: it is empty, or has blanks, control characters or "
            "letters beyond ASCII",
            where=where,
            fix="openssl rand -hex 32 makes a good one",
        )


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    """A TLS context that trusts the system's certificates, or those of a file."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # includes SSLError
        raise BadInput(
            f"no certificates could be read ({first_line(error)})", where=f"ca_file {ca_file}"
        ) from error


def _seconds(text: Any) -> float:
    """The pause that a busy server asks for: a number, or a date, which is not read."""
    try:
        return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, float(text)))  # NaN: the shortest
    except (TypeError, ValueError):
        return 1.0
