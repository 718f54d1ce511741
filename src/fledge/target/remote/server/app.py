"""The target server as an ASGI application; `remote/protocol.py` describes its routes.

Messages are sent in large pieces of the tensors' own memory, which reaches the speed of a plain
socket (benchmarks/results/remote.md).
"""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
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
from fledge.target.remote.protocol import PROTOCOL
from fledge.target.remote.server.answers import AnswerQueue, Target
from fledge.target.remote.wire import Message

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_TOKENS, MAX_REQUESTS = 1 << 18, 64
_MAX_BODY_BYTES = 64 << 20
_SEND_TIMEOUT_S = 60.0  # for a client to read the next piece


class _ClientGone(Exception):  # noqa: N818  (ends a request, not an error)
    """The client disconnected."""


class _Refusal(Exception):  # noqa: N818  (an answer to the client)
    """A request that is answered with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _verdict(error: Exception) -> tuple[int, str]:
    """The status and reason of a request that ended in an error."""
    reason = first_line(error)
    if isinstance(error, _Refusal):
        return error.status, reason
    if isinstance(error, NotFinite):
        return 500, reason
    if isinstance(error, ValueError):  # includes WireError: malformed input
        return 400, reason
    return 500, f"the target failed ({type(error).__name__}: {reason})"


class _Request:
    """One request, and the reply to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.route = scope["method"], scope["path"]
        self.headers = dict(scope["headers"])
        self.replied = False  # whether a reply has started
        self._receive, self._send = receive, send

    async def read_body(self) -> bytearray:
        body = bytearray()
        while len(body) <= _MAX_BODY_BYTES:
            part = await self._receive()
            if part["type"] == "http.disconnect":
                raise _ClientGone
            body += part.get("body", b"")
            if not part.get("more_body", False):
                return body
        raise _Refusal(413, f"the body has more than {_MAX_BODY_BYTES} bytes")

    async def disconnected(self) -> None:
        """Wait until the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply_json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        await self._start(status, b"application/json", len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def reply_message(self, message: Message) -> None:
        """Send large pieces of the tensors' own memory; a client that stops reading is dropped."""
        await self._start(200, b"application/octet-stream", message.nbytes)
        for chunk in message.chunks():
            piece = {"type": "http.response.body", "body": chunk, "more_body": True}
            try:
                await asyncio.wait_for(self._send(piece), _SEND_TIMEOUT_S)
            except TimeoutError:  # the reply has started: the connection can only be closed
                raise _ClientGone from None
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, kind: bytes, length: int) -> None:
        self.replied = True
        headers = [(b"content-type", kind), (b"content-length", str(length).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class TargetServer:
    """The routes for one target. With a token, only /health is answered without it."""

    def __init__(
        self,
        backend: Eagle3TargetBackend,
        *,
        model: str,
        engine: str = "hf",
        model_dir: Path | None = None,
        token: str | None = None,
        max_requests: int = MAX_REQUESTS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        if token is not None:
            check_token(token, where="token")
        self.token = token
        self.target = Target(backend, max_tokens)
        self.queue = AnswerQueue(self.target)
        self._max_requests, self.pending = max_requests, 0  # questions up to the end of their reply
        self._model_dir = model_dir
        self.info = self._describe(model, engine)
        self._routes: dict[tuple[str, str], Callable[[_Request], Awaitable[None]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/info"): lambda request: request.reply_json(self.info),
            ("GET", "/v1/embeddings"): partial(self._send_part, self._embedding),
            ("GET", "/v1/head"): partial(self._send_part, self._head),
            ("GET", "/v1/files"): partial(self._send_part, self._files),
            ("POST", "/v1/generate"): self._generate,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; every error becomes a status and one line."""
        request = _Request(scope, receive, send)
        try:
            self._check_token(request)
            if request.route not in self._routes:
                raise _Refusal(404, "no such path")
            await self._routes[request.route](request)
        except _ClientGone:
            return
        except Exception as error:  # whatever it is, the client is told
            if request.replied:
                raise
            status, reason = _verdict(error)
            final = isinstance(error, NotFinite)  # our error, which a retry does not fix
            await request.reply_json({"error": reason, "final": final}, status)

    def _check_token(self, request: _Request) -> None:
        given, expected = request.headers.get(b"authorization", b""), f"Bearer {self.token}"
        if self.token is None or request.route[1] == "/health":  # load balancers have no token
            return
        if not hmac.compare_digest(given, expected.encode()):
            raise _Refusal(401, "a valid bearer token is needed")

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
            "max_tokens": self.target.max_tokens,
        }

    async def _health(self, request: _Request) -> None:
        await request.reply_json({"status": "ok", "queue": self.pending, **self.queue.counts})

    # --- parts of the target -------------------------------------------------------------------

    async def _send_part(self, make: Callable[[], Message], request: _Request) -> None:
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
        question = await asyncio.to_thread(self.target.read, await request.read_body())
        held = self.target.info.weights_fingerprint
        if question.fingerprint not in ("", held):
            what = f"weights {question.fingerprint} were asked for, this server holds {held}"
            raise _Refusal(409, what)
        if self.pending >= self._max_requests:
            raise _Refusal(429, f"{self.pending} questions are waiting already")
        self.pending += 1
        try:
            answer = asyncio.ensure_future(self.queue.answer(question))
            gone = asyncio.ensure_future(request.disconnected())
            try:
                await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    raise _ClientGone
            finally:
                for task in (answer, gone):
                    task.cancel()
                await asyncio.wait({answer, gone})  # it is out of the queue from here on
            await request.reply_message(answer.result())
        finally:
            self.pending -= 1
