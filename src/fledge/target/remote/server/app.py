"""The target server's routes. What they mean is written in `remote/protocol.py`.

Small replies go through FastAPI; messages are sent by hand in large pieces of the tensors' own
memory, which reaches the speed of a plain socket (benchmarks/results/remote.md).
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Response
from starlette.routing import Route

from fledge import __version__
from fledge.core.errors import first_line
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.manifest import copied_files, target_facts, target_tensors
from fledge.target.finite import NotFinite
from fledge.target.remote.client import boot_id
from fledge.target.remote.protocol import PROTOCOL, WIRE_ENCODINGS, Question, WireShape
from fledge.target.remote.segment import write_segment
from fledge.target.remote.server.answers import Target
from fledge.target.remote.server.guard import App, Guard, Receive, Scope, Send, send_head, send_json
from fledge.target.remote.server.metrics import Metrics
from fledge.target.remote.server.queue import AnswerQueue, Limits, QueueFull
from fledge.target.remote.wire import Message, check_digest, unpack

_LONGEST_REASON = 500  # characters
_BODY_TIMEOUT_S = 60.0  # for a request's body to arrive, and for a client to take the next piece


class _Gone(Exception):  # noqa: N818  (ends a request, no fault)
    """The client left."""


class _Late(Exception):  # noqa: N818  (an answer to the client)
    """The client takes too long to say what it wants."""


class TargetServer:
    """The routes over one target."""

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
        self.metrics, self.target = Metrics(), Target(backend)
        self.queue = AnswerQueue(self.target, self.metrics, self.limits)
        self._model_dir = model_dir
        self.info = self._describe(model, engine)
        self.app: App = Guard(
            self._routes(), token=token, max_body=self.limits.max_body_bytes, metrics=self.metrics
        )

    def _describe(self, model: str, engine: str) -> dict[str, Any]:
        info = self.target.info
        facts = {name: fact for name, fact in target_facts(info, {}).items() if name != "crc"}
        return {
            **facts,
            "protocol": PROTOCOL,
            "fledge": __version__,
            "model": model,
            "engine": engine,
            "hidden_size": info.hidden_size,
            "aux_layer_ids": list(self.target.backend.aux_layer_ids),
            "encodings": list(WIRE_ENCODINGS),
            "max_tokens": self.limits.max_tokens,
            "max_body_bytes": self.limits.max_body_bytes,
            "boot_id": boot_id(),
        }

    def _routes(self) -> FastAPI:
        app = FastAPI(title="fledge target server", version=__version__, openapi_url=None)

        @app.get("/health")
        async def health() -> dict[str, Any]:
            return {"status": "ok", "queue": self.queue.waiting}

        @app.get("/v1/info")
        async def info() -> dict[str, Any]:
            return self.info

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

        app.router.routes += [
            Route("/v1/embeddings", _Once(self._embeddings), methods=["GET"]),
            Route("/v1/head", _Once(self._head), methods=["GET"]),
            Route("/v1/files", _Once(self._files), methods=["GET"]),
            Route("/v1/generate", _Generate(self), methods=["POST"]),
        ]
        return app

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


class _Once:
    """A route whose reply is a message that takes a while to put together."""

    def __init__(self, make: Callable[[], Message]) -> None:
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_message(send, await asyncio.to_thread(self._make))


class _Generate:
    """POST /v1/generate, from the body's first byte to the reply's last."""

    def __init__(self, server: TargetServer) -> None:
        self._server, self._queue = server, server.queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive, self._server.limits.max_body_bytes)
            if body is None:
                await send_json(send, 413, {"error": "the body is too large"})
                return
            question = await asyncio.to_thread(self._read, body)
            if await self._refused(question, send):
                return
            with self._queue.admitted(self._reply_bytes(question)):
                message = await self._answer(question, receive)
                await self._reply(question, message, send)
        except _Gone:
            return
        except _Late:
            await send_json(send, 408, {"error": "the body did not arrive in time"})
        except QueueFull as full:
            after = {"Retry-After": str(math.ceil(full.retry_after_s))}  # HTTP knows whole seconds
            facts = {"error": str(full), "retry_after_s": full.retry_after_s}
            await send_json(send, 429, facts, after)
        except NotFinite as error:  # a fault of ours that asking again does not mend
            await send_json(send, 500, {"error": first_line(error), "final": True})
        except ValueError as error:  # WireError among them: malformed input is the client's problem
            await send_json(send, 400, {"error": first_line(error)[:_LONGEST_REASON]})
        except (RuntimeError, OSError, MemoryError, LookupError, TypeError) as error:
            reason = first_line(error)[:_LONGEST_REASON]
            what = f"the target failed ({type(error).__name__}: {reason})"
            await send_json(send, 500, {"error": what})

    def _read(self, body: bytearray) -> Question:
        tensors, metadata = unpack(body)
        check_digest(body)
        question = Question.read(tensors, metadata)
        if question.rows.tokens <= self._server.limits.max_tokens:
            self._server.target.check(question)
        return question

    async def _refused(self, question: Question, send: Send) -> bool:
        most, wanted = self._server.limits.max_tokens, question.fingerprint
        if question.rows.tokens > most:
            what = f"{question.rows.tokens} tokens in one request, {most} are allowed"
            await send_json(send, 413, {"error": what})
            return True
        if wanted and wanted != self._server.target.info.weights_fingerprint:
            what = f"weights {wanted} were asked for, this server holds "
            what += self._server.target.info.weights_fingerprint
            await send_json(send, 409, {"error": what})
            return True
        return False

    def _reply_bytes(self, question: Question) -> int:
        info = self._server.target.info
        layers = len(self._server.target.backend.aux_layer_ids)
        shape = WireShape.of(
            question, hidden_size=info.hidden_size, aux_layers=layers, dtype=info.dtype
        )
        return shape.answer_bytes(question.rows.tokens, int(question.rows.loss_mask.bool().sum()))

    async def _answer(self, question: Question, receive: Receive) -> Message:
        """Wait for the target's turn, or for the client to leave."""
        answer = asyncio.ensure_future(self._queue.answer(question))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _Gone
            return answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    async def _reply(self, question: Question, message: Message, send: Send) -> None:
        queue, way = {"X-Fledge-Queue": str(self._queue.waiting)}, "body"
        size = message.nbytes
        name = question.segment
        if name != "" and await asyncio.to_thread(write_segment, name, message):
            facts = {"request_id": question.request_id, "segment_bytes": str(size)}
            message, way = Message({}, facts), "shared_memory"
        await _send_message(send, message, queue)
        self._server.metrics.count("reply_bytes_total", size, way=way)


async def _read_body(receive: Receive, most: int) -> bytearray | None:
    """The whole body; None when there is more of it than allowed."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while True:
                part = await receive()
                if part["type"] == "http.disconnect":
                    raise _Gone
                body += part.get("body", b"")
                if len(body) > most:
                    return None
                if not part.get("more_body", False):
                    return body
    except TimeoutError:
        raise _Late from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_message(
    send: Send, message: Message, headers: dict[str, str] | None = None
) -> None:
    """Large pieces of the tensors' own memory; a client that reads nothing is dropped."""
    await send_head(send, 200, "application/octet-stream", message.nbytes, headers)
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S) as limit:
            for chunk in message.chunks():
                limit.reschedule(now() + _BODY_TIMEOUT_S)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:  # the reply has begun: all that is left is to close the connection
        raise _Gone from None
