"""A client's connections to one target server: keep-alive, deadlines, complete replies.

Built on http.client, which can read a body directly into the memory that the tensors will use.
Every exchange has one deadline and ends in a complete reply or in an exception.
"""

import contextlib
import http.client
import io
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
from fledge.core.reading import OBJECT, Anything, Expected, Flag, Number, Table, parse_json
from fledge.target.finite_check import NotFinite
from fledge.target.remote.wire import CHUNK_BYTES, DigestCheck, WireError

log = logging.getLogger("fledge.remote")

REMIND_S = 30.0  # between two words about a wait
_SMALL_BYTES = 1 << 20  # larger than any JSON reply
_RECORD_BYTES = 1 << 14  # TLS sends this much at once
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 60.0  # whatever a busy server asks for
_ERROR = Table(optional={"error": Anything(), "retry_after_s": Number(), "final": Flag()})


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


class _Clock:
    """The time that one exchange may take, over all its parts."""

    def __init__(self, request: str, timeout_s: float) -> None:
        self._request, self._timeout_s = request, timeout_s
        self._begin = self._reminded_at = time.monotonic()
        self.awaited = "a connection"

    def left(self) -> float:
        """The seconds left; raises once there are none. Says what is awaited, now and then."""
        now = time.monotonic()
        left = self._begin + self._timeout_s - now
        if left <= 0:
            raise TimeoutError(self.ran_out())
        if now - self._reminded_at >= REMIND_S:
            self._reminded_at = now
            log.warning("%s: still waiting for %s, for another %.0f s at most", self._request,
                        self.awaited, left)  # fmt: skip
        return left

    def ran_out(self) -> str:
        return f"no whole reply within {self._timeout_s:.3g} s, still waiting for {self.awaited}"


class _Timed(io.RawIOBase):
    """The bytes that arrive on a connection; no wait for them outlasts the clock."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, clock: _Clock) -> None:
        self._raw, self._sock, self._clock = raw, sock, clock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            self._sock.settimeout(min(REMIND_S, self._clock.left()))
            with contextlib.suppress(TimeoutError):  # whether time is up, the clock says
                return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A reply of which every part is read against the clock, beginning with its status."""

    def __init__(self, clock: _Clock, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, clock))


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
        self,
        path: str,
        expected: Expected = OBJECT,
        *,
        body: bytes | None = None,
        timeout_s: float,
    ) -> dict[str, Any]:
        """A reply that is JSON, read as any metadata from an untrusted source is."""
        reply = self.exchange(path, body, timeout_s, _SMALL_BYTES, digest=False)
        value: dict[str, Any] = parse_json(
            bytes(reply.body), expected, where=self.url, what=f"its {path}"
        )
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
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
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
        clock = _Clock(f"{self.url}{path}", timeout_s)
        while True:
            connection, reused = self._connect(clock)
            with self._lock:
                closed = self._closed  # while it connected: `close` has not seen it
                if not closed:
                    self._busy.add(connection)
            if closed:
                connection.close()
                raise ServerDown("this client is closed")
            try:
                self._send(connection, path, body, clock)
                reply = self._receive(connection, clock, max_bytes, digest)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                connection.close()
                if reused:  # the server had closed it in the meantime: retry on a new one
                    continue
                raise ServerFault(f"closed the connection ({first_line(error)})") from error
            except TimeoutError as error:
                connection.close()
                raise ServerFault(clock.ran_out()) from error
            except (OSError, http.client.HTTPException, WireError) as error:
                connection.close()
                raise ServerFault(first_line(error)) from error
            except BaseException:
                connection.close()
                raise
            finally:
                with self._lock:
                    self._busy.discard(connection)
            self._keep(connection)
            return reply

    def _keep(self, connection: HTTPConnection) -> None:
        """Keep a connection for the next exchange, unless either side closed it meanwhile."""
        with self._lock:
            if not self._closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, clock: _Clock) -> tuple[HTTPConnection, bool]:
        """(connection, whether it is a reused one)."""
        with self._lock:
            if self._closed:
                raise ServerDown("this client is closed")
            if self._idle:
                return self._idle.pop(), True
        kind = HTTPConnection if self._tls is None else partial(HTTPSConnection, context=self._tls)
        connection = kind(self._host, self._port)
        connection.auto_open = 0  # which would have no deadline
        try:
            timeout_s = min(10.0, clock.left())
            sock = socket.create_connection((connection.host, connection.port), timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock.settimeout(clock.left())
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
            connection.sock = sock
        except ssl.SSLError as error:
            raise Refused(
                f"TLS failed ({first_line(error)})",
                status=0,
                where=self.url,
                fix="see target.ca_file",
            ) from error
        except OSError as error:
            raise ServerDown(first_line(error)) from error
        return connection, False

    def _send(
        self, connection: HTTPConnection, path: str, body: bytes | None, clock: _Clock
    ) -> None:
        clock.awaited = "room to send the request"
        connection.sock.settimeout(clock.left())
        if body is None:
            connection.request("GET", path, headers=self._headers)
            return

        def records() -> Iterator[bytes]:
            for at in range(0, len(body), _RECORD_BYTES):
                connection.sock.settimeout(clock.left())  # under TLS it limits each send
                yield body[at : at + _RECORD_BYTES]

        length = {"Content-Length": str(len(body))}
        connection.request("POST", path, body=records(), headers=self._headers | length)

    def _receive(
        self, connection: HTTPConnection, clock: _Clock, max_bytes: int, digest: bool
    ) -> Reply:
        clock.awaited = "the headers of its reply"
        connection.response_class = partial(_Response, clock)  # type: ignore[assignment]
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
            clock.awaited = f"the rest of its reply, after {at} of {length} bytes"
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
