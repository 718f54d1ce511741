"""The target server's routes, which are described in `remote/protocol.py`.

Small replies go through FastAPI; messages are sent directly, in large pieces of the tensors' own
memory, which reaches the speed of a plain socket (benchmarks/results/remote.md).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Response
from starlette.routing import Route

from fledge import __version__
from fledge.core.errors import first_line
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.manifest import copied_files, target_facts, target_tensors
from fledge.target.finite_check import NotFinite
from fledge.target.remote.client import boot_id
from fledge.target.remote.http import check_token
from fledge.target.remote.protocol import PROTOCOL, Question, TooLarge, WireShape
from fledge.target.remote.segment import write_segment
from fledge.target.remote.server.admission import Limits, Metrics, Place, QueueFull
from fledge.target.remote.server.answers import Target
from fledge.target.remote.server.guard import App, Guard, Receive, Scope, Send, send_head, send_json
from fledge.target.remote.server.queue import AnswerQueue
from fledge.target.remote.wire import Message

_MAX_REASON_LENGTH = 500  # characters
_BODY_TIMEOUT_S = 60.0  # for a request's body to arrive, and for a client to read the next piece
_STALL_S = 10.0  # for the next piece of a body
_SMALL_BYTES = 16 << 10  # parsing such a body is faster than handing it to a thread

Respond = Callable[[Place, Scope, Receive, Send], Awaitable[None]]


class _ClientGone(Exception):  # noqa: N818  (ends a request, not an error)
    """The client disconnected."""


class _Refusal(Exception):  # noqa: N818  (an answer to the client)
    """A request that is answered with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


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
        self.queue = AnswerQueue(self.target, self.metrics, self.limits)
        self._model_dir = model_dir
        self.info = self._describe(model, engine)

    def app(self, host: str | None = None) -> App:
        """The application; with `host` only for clients that name this machine, see `Guard`."""
        return Guard(
            self._routes(),
            token=self.token,
            host=host,
            max_body=self.limits.max_body_bytes,
            metrics=self.metrics,
        )

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
            "boot_id": boot_id(),
        }

    def _routes(self) -> FastAPI:
        app = FastAPI(title="fledge target server", version=__version__, openapi_url=None)
        app.router.redirect_slashes = False  # a redirect would echo the request's Host header

        @app.get("/health")
        async def health() -> dict[str, Any]:
            return {"status": "ok", "queue": self.queue.waiting}

        @app.get("/v1/info")
        async def info() -> dict[str, Any]:
            return self.info

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

        def add(path: str, method: str, respond: Respond) -> None:
            app.router.routes.append(Route(path, _Messages(self.queue, respond), methods=[method]))

        for name, make in (
            ("embeddings", self._embeddings), ("head", self._head), ("files", self._files),
        ):  # fmt: skip
            add(f"/v1/{name}", "GET", partial(self._send_part, make))
        add("/v1/generate", "POST", self._generate)
        return app

    # --- parts of the target -------------------------------------------------------------------

    async def _send_part(
        self, make: Callable[[], Message], place: Place, _: Scope, __: Receive, send: Send
    ) -> None:
        place.take_reply(self._largest_part)
        await _send_message(send, await asyncio.to_thread(make))

    @property
    def _largest_part(self) -> int:
        """The bytes of the embedding or the head, whichever is larger; files are much smaller."""
        head = self.target.info.head
        weight = self.target.backend.get_input_embeddings().weight
        return max(weight.nbytes, 0 if head is None else head.weight_VD.nbytes)

    def _parts(self) -> dict[str, torch.Tensor]:
        weight = self.target.backend.get_input_embeddings().weight
        return target_tensors(self.target.info, weight)

    def _embeddings(self) -> Message:
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

    async def _generate(self, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/generate, from the first byte of the body to the last byte of the reply."""
        declared = _declared_length(scope)
        if declared is not None:
            place.take_body(declared)  # before any of it is read
        max_bytes = self.limits.max_body_bytes
        body = await _read_body(receive, max_bytes, place if declared is None else None)
        small = len(body) < _SMALL_BYTES
        read = self.target.read
        question = read(body) if small else await asyncio.to_thread(read, body)
        del body
        held = self.target.info.weights_fingerprint
        if question.fingerprint not in ("", held):
            what = f"weights {question.fingerprint} were asked for, this server holds {held}"
            raise _Refusal(409, what)
        place.take_reply(self._reply_bytes(question))
        message = await self._answer(question, receive)
        await self._reply(question, message, send)

    def _reply_bytes(self, question: Question) -> int:
        info = self.target.info
        layers = len(self.target.backend.aux_layer_ids)
        shape = WireShape.of(
            question, hidden_size=info.hidden_size, aux_layers=layers, dtype=info.dtype
        )
        return shape.answer_bytes(question.rows.tokens, int(question.rows.loss_mask.bool().sum()))

    async def _answer(self, question: Question, receive: Receive) -> Message:
        """Wait for the answer, or for the client to disconnect."""
        answer = asyncio.ensure_future(self.queue.answer(question))
        gone = asyncio.ensure_future(_disconnected(receive))
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

    async def _reply(self, question: Question, message: Message, send: Send) -> None:
        headers, way = {"X-Fledge-Queue": str(self.queue.waiting)}, "body"
        size, name = message.nbytes, question.segment
        if name != "" and await asyncio.to_thread(write_segment, name, message):
            facts = {"request_id": question.request_id, "segment_bytes": str(size)}
            message, way = Message({}, facts), "shared_memory"
        # Counted before it is sent: a client that has the answer finds it in the metrics.
        self.metrics.count("reply_bytes_total", size, way=way)
        await _send_message(send, message, headers)


class _Messages:
    """An ASGI route whose replies are messages: each needs a place among the requests in progress.
    Every error becomes a status and one line."""

    def __init__(self, queue: AnswerQueue, respond: Respond) -> None:
        self._queue, self._respond = queue, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._queue.admission.place() as place:
                await self._respond(place, scope, receive, send)
        except _ClientGone:
            return
        except QueueFull as full:
            after = {"Retry-After": str(math.ceil(full.retry_after_s))}  # must be whole seconds
            facts = {"error": str(full), "retry_after_s": full.retry_after_s}
            await send_json(send, 429, facts, after)
        except NotFinite as error:  # our error, which a retry does not fix
            await send_json(send, 500, {"error": first_line(error), "final": True})
        except _Refusal as refusal:
            await send_json(send, refusal.status, {"error": str(refusal)})
        except ValueError as error:  # includes WireError: malformed input is the client's error
            status = 413 if isinstance(error, TooLarge) else 400
            await send_json(send, status, {"error": first_line(error)[:_MAX_REASON_LENGTH]})
        except (RuntimeError, OSError, MemoryError, LookupError, TypeError) as error:
            reason = first_line(error)[:_MAX_REASON_LENGTH]
            what = f"the target failed ({type(error).__name__}: {reason})"
            await send_json(send, 500, {"error": what})


def _declared_length(scope: Scope) -> int | None:
    """The declared length of the body; None if it comes in chunks."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    return int(headers.get(b"content-length", b"0"))


async def _read_body(receive: Receive, max_bytes: int, place: Place | None) -> bytearray:
    """The whole body. With `place`, for an undeclared length, room is reserved as it arrives."""
    body = bytearray()
    now = asyncio.get_running_loop().time
    end = now() + _BODY_TIMEOUT_S
    try:
        async with asyncio.timeout_at(end) as limit:
            while True:
                limit.reschedule(min(end, now() + _STALL_S))
                part = await receive()
                if part["type"] == "http.disconnect":
                    raise _ClientGone
                piece = part.get("body", b"")
                if len(body) + len(piece) > max_bytes:
                    raise _Refusal(413, "the body is too large")
                if place is not None:
                    place.take_body(len(piece))
                body += piece
                if not part.get("more_body", False):
                    return body
    except TimeoutError:
        raise _Refusal(408, "the body did not arrive in time") from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_message(
    send: Send, message: Message, headers: dict[str, str] | None = None
) -> None:
    """Send large pieces of the tensors' own memory; a client that stops reading is dropped."""
    await send_head(send, 200, "application/octet-stream", message.nbytes, headers)
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S) as limit:
            for chunk in message.chunks():
                limit.reschedule(now() + _BODY_TIMEOUT_S)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:  # the reply has started: the connection can only be closed
        raise _ClientGone from None
