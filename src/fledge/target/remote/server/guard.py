"""Checks in front of every route, from headers alone: the token, the size limit, the metrics."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from fledge.target.remote.server.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = (
    *("/health", "/metrics", "/v1/info", "/v1/embeddings", "/v1/head", "/v1/files"),
    "/v1/generate",
)
OPEN_PATHS = ("/health",)  # for load balancers, which have no token


class Guard:
    """Answers 401 and 413 itself and passes all other requests on."""

    def __init__(self, app: App, *, token: str | None, max_body: int, metrics: Metrics) -> None:
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            await self._admit(scope, receive, counted)
        except asyncio.CancelledError:  # the server is shutting down, and the time to drain is over
            if not started:
                with suppress(asyncio.CancelledError):
                    await send_json(counted, 503, {"error": "the server is shutting down"})

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN_PATHS and not self._is_authorized(headers):
            what = "a valid bearer token is needed"
            await send_json(send, 401, {"error": what}, {"WWW-Authenticate": "Bearer"})
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            what = (
                f"the body has {length[:20].decode('latin1')} bytes, {self._max_body} are allowed"
            )
            await send_json(send, 413, {"error": what})
            return
        await self._app(scope, receive, send)

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        if self._expected is None:
            return True
        # constant time, wherever the first difference is
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected)


class OwnHosts:
    """Accepts only requests whose Host header names this machine. This stops DNS rebinding: a web
    page whose domain resolves to 127.0.0.1 can make a browser send requests to a local server, but
    only with the page's own domain as the host."""

    def __init__(self, app: App, host: str) -> None:
        self._app = app
        self._hosts = {"localhost", "127.0.0.1", "::1", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value for name, value in scope.get("headers", ()) if name == b"host"]
        unrestricted = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if unrestricted or (len(hosts) == 1 and self._is_own(hosts[0].decode("latin1"))):
            await self._app(scope, receive, send)
            return
        what = "the Host header does not name this machine; without a token only it may ask"
        await send_json(send, 421, {"error": what})

    def _is_own(self, host: str) -> bool:
        """Whether a host is this machine, with any port: ssh -L may forward from another one."""
        name, port = host, ""
        if host.startswith("["):
            name, _, port = host[1:].partition("]")
            port = port.removeprefix(":")
        elif ":" in host:
            name, _, port = host.partition(":")
        return name.lower() in self._hosts and (not port or port.isdecimal())


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
