"""The target server as an ASGI application; `remote/protocol.py` describes its routes.

Messages are sent in large pieces of the tensors' own memory, which reaches the speed of a plain
socket (benchmarks/results/remote.md).
"""

import asyncio
import hmac
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fledge import __version__
from fledge.core.errors import first_line
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.manifest import copied_files, target_facts, target_tensors
from fledge.target.finite_check import NotFinite
from fledge.target.remote.http import check_token
from fledge.target.remote.protocol import PROTOCOL, Question, TooLarge, WireShape
from fledge.target.remote.server.answers import Target
from fledge.target.remote.server.queue import AnswerQueue, Limits, Metrics, QueueFull
from fledge.target.remote.wire import Message

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MAX_REASON_LENGTH = 500  # characters
_BODY_TIMEOUT_S = 60.0  # for a request's body to arrive, and for a client to read the next piece
_SMALL_BYTES = 16 << 10  # parsing such a body is faster than handing it to a thread
_HOST = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d*)?")  # [IPv6 address] or name, port
_ERRORS = (QueueFull, ValueError, RuntimeError, OSError, MemoryError, LookupError, TypeError)


class _ClientGone(Exception):  # noqa: N818  (ends a request, not an error)
    """The client disconnected."""


class _Refusal(RuntimeError):  # noqa: N818  (an answer to the client)
    """A request that is answered with a status and a reason."""

    def __init__(
        self, status: int, reason: str, headers: Mapping[str, str] | None = None, **facts: Any
    ) -> None:
        super().__init__(reason)
        self.status, self.headers, self.facts = status, headers, {"error": reason, **facts}

    @classmethod
    def of(cls, error: Exception) -> "_Refusal":
        """The reply to a request that ended in an error."""
        reason = first_line(error)[:_MAX_REASON_LENGTH]
        if isinstance(error, _Refusal):
            return error
        if isinstance(error, QueueFull):
            seconds = error.retry_after_s
            after = {"Retry-After": str(math.ceil(seconds))}  # must be whole seconds
            return cls(429, reason, after, retry_after_s=seconds)
        if isinstance(error, NotFinite):  # our error, which a retry does not fix
            return cls(500, reason, final=True)
        if isinstance(error, ValueError):  # includes WireError: malformed input
            return cls(413 if isinstance(error, TooLarge) else 400, reason)
        return cls(500, f"the target failed ({type(error).__name__}: {reason})")


class _Request:
    """One request, and the reply to it."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, count: Callable[[str, int], None]
    ) -> None:
        self.path, self.method = scope["path"], scope["method"]
        self.header_list: Iterable[tuple[bytes, bytes]] = scope["headers"]
        self.headers = dict(self.header_list)
        self.status: int | None = None  # of the reply, once it has started
        self._receive, self._send, self._count = receive, send, count

    async def read_body(self) -> bytearray:
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while True:
                    part = await self._receive()
                    if part["type"] == "http.disconnect":
                        raise _ClientGone
                    body += part.get("body", b"")
                    if not part.get("more_body", False):
                        return body
        except TimeoutError:
            raise _Refusal(408, "the body did not arrive in time") from None

    async def disconnected(self) -> None:
        """Wait until the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.reply(json.dumps(value).encode(), "application/json", status, headers)

    async def reply(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._start(status, kind, len(body), headers)
        await self._send({"type": "http.response.body", "body": body})

    async def reply_message(
        self, message: Message, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send large pieces of the tensors' own memory; a client that stops reading is dropped."""
        await self._start(200, "application/octet-stream", message.nbytes, headers)
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S) as limit:
                for chunk in message.chunks():
                    limit.reschedule(now() + _BODY_TIMEOUT_S)
                    await self._send(
                        {"type": "http.response.body", "body": chunk, "more_body": True}
                    )
                await self._send({"type": "http.response.body", "body": b""})
        except TimeoutError:  # the reply has started: the connection can only be closed
            raise _ClientGone from None

    async def _start(
        self, status: int, kind: str, length: int, headers: Mapping[str, str] | None
    ) -> None:
        self.status = status
        self._count(self.path, status)  # first: who has the reply finds it in the metrics
        fields = {"content-type": kind, "content-length": str(length), **(headers or {})}
        encoded = [(name.lower().encode(), text.encode()) for name, text in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


class TargetServer:
    """The routes for one target."""

    def __init__(
        self,
        backend: Eagle3TargetBackend,
        *,
        model: str,
        engine: str = "hf",
        model_dir: Path | None = None,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        if token is not None:
            check_token(token, where="token")
        self.token = token
        self.metrics, self.target = Metrics(), Target(backend, self.limits)
        self.queue = AnswerQueue(self.target.answer, self.metrics, self.limits)
        self._model_dir = model_dir
        self.info = self._describe(model, engine)
        self._routes: dict[str, tuple[str, Callable[[_Request], Awaitable[None]]]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._send_metrics),
            "/v1/info": ("GET", lambda request: request.reply_json(self.info)),
            "/v1/embeddings": ("GET", partial(self._send_part, self._embedding)),
            "/v1/head": ("GET", partial(self._send_part, self._head)),
            "/v1/files": ("GET", partial(self._send_part, self._files)),
            "/v1/generate": ("POST", self._generate),
        }

    def app(self, host: str | None = None) -> App:
        """The application. With `host`, only requests whose Host header names this machine are
        accepted. This stops DNS rebinding: a web page whose domain resolves to 127.0.0.1 can make
        a browser send requests to a local server, but only with the page's own domain as host."""
        hosts = None if host is None else {"localhost", "127.0.0.1", "::1", host.lower()}

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await self._respond(_Request(scope, receive, send, self._count), hosts)

        return respond

    def _count(self, path: str, status: int) -> None:
        path = path if path in self._routes else "other"  # clients can make up any number of paths
        self.metrics.count("http_requests_total", path=path, status=str(status))

    async def _respond(self, request: _Request, hosts: set[str] | None) -> None:
        """Answer a request; every error becomes a status and one line."""
        try:
            self._check(request, hosts)
            method, respond = self._routes[request.path]
            if method != request.method:
                raise _Refusal(405, f"this path takes {method}", {"Allow": method})
            await respond(request)
        except _ClientGone:
            return
        except asyncio.CancelledError:  # the server is shutting down, and the time to drain is over
            if request.status is None:
                with suppress(asyncio.CancelledError):
                    await request.reply_json({"error": "the server is shutting down"}, 503)
        except _ERRORS as error:
            if request.status is not None:
                raise
            refusal = _Refusal.of(error)
            await request.reply_json(refusal.facts, refusal.status, refusal.headers)

    def _check(self, request: _Request, hosts: set[str] | None) -> None:
        """Check the host, the token, the path and the announced size, from the headers alone."""
        if request.path != "/health":  # for load balancers, which have no token
            if hosts is not None and _host_of(request) not in hosts:
                what = "the Host header does not name this machine; without a token only it may ask"
                raise _Refusal(421, what)
            expected = f"Bearer {self.token}".encode()
            given = request.headers.get(b"authorization", b"")
            if self.token is not None and not hmac.compare_digest(given, expected):
                what = "a valid bearer token is needed"
                raise _Refusal(401, what, {"WWW-Authenticate": "Bearer"})
        if request.path not in self._routes:
            raise _Refusal(404, "no such path")
        if b"transfer-encoding" in request.headers:
            raise _Refusal(411, "the body's length must be announced (Content-Length)")
        if (size := _body_bytes(request)) > self.limits.max_body_bytes:
            limit = self.limits.max_body_bytes
            raise _Refusal(413, f"the body has {size} bytes, {limit} are allowed")

    def _describe(self, model: str, engine: str) -> dict[str, Any]:
        info = self.target.info
        facts = {name: value for name, value in target_facts(info, {}).items() if name != "crc"}
        return {
            **facts,
            "protocol": PROTOCOL,
            "fledge": __version__,
            "model": model,
            "engine": engine,
            "hidden_size": info.hidden_size,
            "aux_layer_ids": list(self.target.backend.aux_layer_ids),
            "encodings": self.target.encodings,
            "max_tokens": self.limits.max_tokens,
            "max_body_bytes": self.limits.max_body_bytes,
        }

    async def _health(self, request: _Request) -> None:
        await request.reply_json({"status": "ok", "queue": self.queue.waiting})

    async def _send_metrics(self, request: _Request) -> None:
        await request.reply(self.metrics.text().encode(), "text/plain; version=0.0.4")

    # --- parts of the target -------------------------------------------------------------------

    async def _send_part(self, make: Callable[[], Message], request: _Request) -> None:
        head, weight = self.target.info.head, self.target.backend.get_input_embeddings().weight
        largest = max(weight.nbytes, 0 if head is None else head.weight_VD.nbytes)
        with self.queue.admission.place() as reserve:
            reserve(reply_bytes=largest)
            await request.reply_message(await asyncio.to_thread(make))

    def _parts(self) -> dict[str, torch.Tensor]:
        weight = self.target.backend.get_input_embeddings().weight
        return target_tensors(self.target.info, weight)

    def _embedding(self) -> Message:
        return Message({"embed_tokens": self._parts()["embed_tokens"]}, {})

    def _head(self) -> Message:
        parts = self._parts()
        del parts["embed_tokens"]  # a tied head is not sent again
        return Message(parts, {})

    def _files(self) -> Message:
        files = [] if self._model_dir is None else copied_files(self._model_dir)
        contents = {path.name: bytearray(path.read_bytes()) for path in files}
        tensors = {
            name: torch.frombuffer(content, dtype=torch.uint8)
            for name, content in contents.items()
            if content
        }
        return Message(tensors, {})

    # --- questions -----------------------------------------------------------------------------

    async def _generate(self, request: _Request) -> None:
        """POST /v1/generate, from the first byte of the body to the last byte of the reply."""
        with self.queue.admission.place() as reserve:
            reserve(body_bytes=_body_bytes(request))  # before any of it is read
            body = await request.read_body()
            small, read = len(body) < _SMALL_BYTES, self.target.read
            question = read(body) if small else await asyncio.to_thread(read, body)
            del body
            held = self.target.info.weights_fingerprint
            if question.fingerprint not in ("", held):
                what = f"weights {question.fingerprint} were asked for, this server holds {held}"
                raise _Refusal(409, what)
            reserve(reply_bytes=self._reply_bytes(question))
            message = await self._answer(question, request)
            await self._reply(message, request)

    def _reply_bytes(self, question: Question) -> int:
        info = self.target.info
        layers = len(self.target.backend.aux_layer_ids)
        shape = WireShape.of(
            question, hidden_size=info.hidden_size, aux_layers=layers, dtype=info.dtype
        )
        return shape.answer_bytes(question.rows.tokens, int(question.rows.loss_mask.bool().sum()))

    async def _answer(self, question: Question, request: _Request) -> Message:
        """Wait for the answer, or for the client to disconnect."""
        answer = asyncio.ensure_future(self.queue.answer(question))
        gone = asyncio.ensure_future(request.disconnected())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _ClientGone
            return answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    async def _reply(self, message: Message, request: _Request) -> None:
        headers = {"X-Fledge-Queue": str(self.queue.waiting)}
        self.metrics.count("reply_bytes_total", message.nbytes)
        await request.reply_message(message, headers)


def _host_of(request: _Request) -> str | None:
    """The name in the only Host header, without its port: `ssh -L` may forward another one."""
    hosts = [value for name, value in request.header_list if name == b"host"]
    match = _HOST.fullmatch(b"".join(hosts).decode("latin1").lower())
    return None if match is None or len(hosts) != 1 else match[1] or match[2]


def _body_bytes(request: _Request) -> int:
    return int(request.headers.get(b"content-length", b"0"))
