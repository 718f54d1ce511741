"""uvicorn's HTTP protocol, with bounds on what a request may contain besides its body.

The parser buffers an unfinished name, value or target, and uvicorn buffers all headers, so a
request whose head never ends would be buffered until memory runs out. Bytes outside of bodies
(request line, headers, trailers, the framing of chunks) are counted as they arrive.
"""

import math
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fledge.target.remote.server.connections import Connection, Connections

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
_MAX_PIPELINED = 4  # requests sent before the reply to an earlier one
_BODY_S = 90.0  # for any body, even one that no route reads; the routes have shorter limits
_TOO_LARGE_REPLY = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class _TooMuch(Exception):  # noqa: N818  (ends the parsing, not an error of ours)
    """Too many headers, or too many requests at once."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for httptools, which calls `on_...` for each part of a request."""

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
