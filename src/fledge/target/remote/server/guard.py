"""Checks in front of every route, from headers alone: the token, the host, the size limit; and the
metrics about requests."""

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from fledge.target.remote.server.admission import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)  # for load balancers, which have no token
PATHS = (
    *OPEN_PATHS,
    *("/metrics", "/v1/info", "/v1/embeddings", "/v1/head", "/v1/files", "/v1/generate"),
)
_HOST = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d*)?")  # [IPv6 address] or name, port


class Guard:
    """Answers 401, 413 and 421 itself and passes all other requests on.

    With `host`, only requests whose Host header names this machine are accepted. This stops DNS
    rebinding: a web page whose domain resolves to 127.0.0.1 can make a browser send requests to a
    local server, but only with the page's own domain as the host.
    """

    def __init__(
        self, app: App, *, token: str | None, host: str | None, max_body: int, metrics: Metrics
    ) -> None:
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._expected = None if token is None else f"Bearer {token}".encode()
        own = {"localhost", "127.0.0.1", "::1"}
        self._hosts = None if host is None else own | {host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                known_path = scope["path"] in PATHS  # clients can make up any number of others
                self._metrics.count(
                    "http_requests_total",
                    path=scope["path"] if known_path else "other",
                    status=str(message["status"]),
                )
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is None:
                await self._app(scope, receive, counted)
            else:
                status, what, headers = refusal
                await send_json(counted, status, {"error": what}, headers)
        except asyncio.CancelledError:  # the server is shutting down, and the time to drain is over
            if not started:
                with suppress(asyncio.CancelledError):
                    await send_json(counted, 503, {"error": "the server is shutting down"})

    def _refusal(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        """(status, reason, headers) for a request that is not passed on."""
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN_PATHS:
            if not self._names_this_machine(scope):
                what = "the Host header does not name this machine; without a token only it may ask"
                return 421, what, {}
            if not self._is_authorized(headers):
                return 401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"}
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            size = length[:20].decode("latin1")
            return 413, f"the body has {size} bytes, {self._max_body} are allowed", {}
        return None

    def _names_this_machine(self, scope: Scope) -> bool:
        """Whether the only Host header is this machine's, with any port: ssh -L may forward it."""
        if self._hosts is None:
            return True
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        match = _HOST.fullmatch(b"".join(hosts).decode("latin1").lower())
        return len(hosts) == 1 and match is not None and (match[1] or match[2]) in self._hosts

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        if self._expected is None:
            return True
        # constant time, wherever the first difference is
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected)


async def send_json(
    send: Send, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    body = json.dumps(value).encode()
    await send_head(send, status, "application/json", len(body), headers)
    await send({"type": "http.response.body", "body": body})


async def send_head(
    send: Send, status: int, kind: str, length: int, headers: dict[str, str] | None
) -> None:
    """Send the status and headers of a reply whose body follows."""
    fields = {"content-type": kind, "content-length": str(length), **(headers or {})}
    encoded = [(name.lower().encode(), text.encode()) for name, text in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
