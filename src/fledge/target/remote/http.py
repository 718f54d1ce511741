"""A client's connections to one target server: keep-alive, deadlines, complete replies.

Built on http.client, which can read a body directly into the memory that the tensors will use.
Every exchange has one deadline and ends in a complete reply or in one of four exceptions.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.core.addresses import server_address
from fledge.core.errors import BadInput, first_line
from fledge.target.finite import NotFinite
from fledge.target.remote.wire import CHUNK_BYTES, DigestCheck, WireError

_SMALL_BYTES = 1 << 20  # larger than any JSON reply


class ServerDown(Exception):  # noqa: N818  (a status, handled by the fleet)
    """No server is listening; the request itself is not at fault."""


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


class Server:
    """Connections to one URL. Thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        buffers: Buffers | None = None,
        content_type: str | None = None,
    ) -> None:
        parts = server_address(url)
        assert parts.hostname is not None
        if parts.path not in ("", "/") or parts.query:
            raise BadInput("a server's address has no path", where=url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port
        self._tls = _tls_context(ca_file) if parts.scheme == "https" else None
        if token is not None:
            check_token(token, where="token")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if content_type is not None:
            self._headers["Content-Type"] = content_type
        self._buffers = buffers or Buffers(0)
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self._closed = False

    def get_json(self, path: str, body: bytes | None = None, *, timeout_s: float) -> dict[str, Any]:
        reply = self.exchange(path, body, timeout_s, _SMALL_BYTES, digest=False)
        try:
            value = json.loads(bytes(reply.body))
        except ValueError:
            raise ServerFault(f"{path} is not JSON") from None
        if not isinstance(value, dict):
            raise ServerFault(f"{path} is not a JSON object")
        return value

    def close(self) -> None:
        """Close idle connections, abort exchanges in progress, and start no new ones."""
        with self._lock:
            self._closed = True
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
        deadline = time.monotonic() + timeout_s
        while True:
            connection, reused = self._connect(deadline)
            with self._lock:
                closed = self._closed  # while it connected: `close` has not seen it
                if not closed:
                    self._busy.add(connection)
            if closed:
                connection.close()
                raise ServerDown("this client is closed")
            try:
                _set_timeout(connection, deadline)
                method = "GET" if body is None else "POST"
                connection.request(method, path, body=body, headers=self._headers)
                reply = self._receive(connection, deadline, max_bytes, digest)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                connection.close()
                if reused:  # the server had closed it in the meantime: retry on a new one
                    continue
                raise ServerFault(f"closed the connection ({first_line(error)})") from error
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
        """Keep a connection for the next exchange, unless the client was closed meanwhile."""
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, deadline: float) -> tuple[HTTPConnection, bool]:
        """(connection, whether it is a reused one)."""
        with self._lock:
            if self._closed:
                raise ServerDown("this client is closed")
            if self._idle:
                return self._idle.pop(), True
        timeout_s = max(0.01, min(10.0, deadline - time.monotonic()))
        address = (self._host, self._port)
        connection = HTTPConnection(*address, timeout=timeout_s)
        if self._tls is not None:
            connection = http.client.HTTPSConnection(*address, timeout=timeout_s, context=self._tls)
        try:
            connection.connect()
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

    def _receive(
        self, connection: HTTPConnection, deadline: float, max_bytes: int, digest: bool
    ) -> Reply:
        _set_timeout(connection, deadline)
        response = connection.getresponse()
        length = response.length
        if length is None or length > max(max_bytes, _SMALL_BYTES):
            raise WireError(f"a reply of {length} bytes, at most {max_bytes} were expected")
        view = self._buffers.lease(length)
        check = DigestCheck(length) if digest and response.status == 200 else None
        at = 0
        while at < length:
            _set_timeout(connection, deadline)
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
        return Reply(view, int(queue) if queue.isdecimal() else 0)

    def _raise_error(self, status: int, body: bytes, headers: http.client.HTTPMessage) -> None:
        """Raise the exception that corresponds to an error reply."""
        try:
            reply = json.loads(body)
            detail = reply["error"]  # a string, or in OpenAI's API an object with a message
            what = str(detail["message"] if isinstance(detail, dict) else detail)
        except (ValueError, KeyError, TypeError):
            reply, what = {}, f"HTTP {status}"
        if status == 429:
            raise ServerBusy(_seconds(reply.get("retry_after_s", headers.get("Retry-After"))))
        if status >= 500 and reply.get("final") is True:
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


def _set_timeout(connection: HTTPConnection, deadline: float) -> None:
    """Limit the next wait on the socket to the time left until the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no whole reply in time")
    if connection.sock is not None:
        connection.sock.settimeout(left)


def _seconds(text: Any) -> float:
    try:
        return min(60.0, max(0.01, float(text)))
    except (TypeError, ValueError):
        return 1.0
