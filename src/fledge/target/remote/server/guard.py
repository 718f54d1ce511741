"""What stands in front of every route: the token, the size limit, the count; from headers alone."""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
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
    """Answers 401 and 413 itself and lets the rest through."""

    def __init__(self, app: App, *, token: str | None, max_body: int, metrics: Metrics) -> None:
        self._app, self._max_body, self._metrics = app, max_body, metrics
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                known = scope["path"] in PATHS  # strangers invent paths without end
                self._metrics.count(
                    "http_requests_total",
                    path=scope["path"] if known else "other",
                    status=str(message["status"]),
                )
            await send(message)

        headers = dict(scope["headers"])
        if scope["path"] not in OPEN_PATHS and not self._may_enter(headers):
            what = "a valid bearer token is needed"
            await send_json(counted, 401, {"error": what}, {"WWW-Authenticate": "Bearer"})
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            what = (
                f"the body has {length[:20].decode('latin1')} bytes, {self._max_body} are allowed"
            )
            await send_json(counted, 413, {"error": what}, {"Connection": "close"})
            return
        await self._app(scope, receive, counted)

    def _may_enter(self, headers: dict[bytes, bytes]) -> bool:
        if self._expected is None:
            return True
        # the comparison takes the same time wherever the first difference lies
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
    """Status and headers of a reply whose body follows."""
    fields = {"content-type": kind, "content-length": str(length), **(headers or {})}
    encoded = [(name.lower().encode(), text.encode()) for name, text in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
