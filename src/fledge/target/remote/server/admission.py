"""Bounds what a server holds at once, counted when a request's head is read, before its body.

A request keeps its place from its head to the last byte of its reply, so that neither slow senders
nor slow readers can make the server hold more than its limits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fledge.target.remote.server.metrics import Metrics


@dataclass(frozen=True)
class Limits:
    """What a server accepts and holds."""

    max_body_bytes: int = 64 << 20
    max_bodies_bytes: int = 256 << 20  # of all requests in progress
    max_tokens: int = 1 << 18  # rows times width of one request
    max_attention: int = 1 << 34  # its tokens times its longest row or document
    max_documents: int = 1 << 14  # of one request: planning takes time quadratic in them
    max_requests: int = 64
    max_reply_bytes: int = 8 << 30  # of all replies in progress
    merge_tokens: int = 16384


class QueueFull(Exception):  # noqa: N818  (an answer to the client, not a fault)
    """The server is at its limits: retry after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full for about {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class Admission:
    """Requests in progress, and the bytes of their bodies and replies. On the event loop only."""

    def __init__(self, limits: Limits, metrics: Metrics, expected_s: Callable[[], float]) -> None:
        self._limits, self._metrics, self._expected_s = limits, metrics, expected_s
        self._requests = self._body_bytes = self._reply_bytes = 0

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """A place for one request; raises `QueueFull` if there is none."""
        if self._requests >= self._limits.max_requests:
            raise QueueFull(self._expected_s())
        place = Place(self)
        self._count(requests=1)
        try:
            yield place
        finally:
            self._count(-1, -place.body_bytes, -place.reply_bytes)

    def take_body(self, nbytes: int) -> None:
        if self._body_bytes and self._body_bytes + nbytes > self._limits.max_bodies_bytes:
            raise QueueFull(max(1.0, self._expected_s()))
        self._count(body_bytes=nbytes)

    def take_reply(self, nbytes: int) -> None:
        """Reserve room for a reply. One above the limit is admitted if no other is in progress: it
        could never be sent otherwise."""
        if self._reply_bytes and self._reply_bytes + nbytes > self._limits.max_reply_bytes:
            raise QueueFull(self._expected_s())
        self._count(reply_bytes=nbytes)

    def _count(self, requests: int = 0, body_bytes: int = 0, reply_bytes: int = 0) -> None:
        self._requests += requests
        self._body_bytes += body_bytes
        self._reply_bytes += reply_bytes
        self._metrics.set(
            pending_requests=self._requests,
            pending_body_bytes=self._body_bytes,
            pending_reply_bytes=self._reply_bytes,
        )


class Place:
    """One request's share of the limits."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.body_bytes = self.reply_bytes = 0

    def take_body(self, nbytes: int) -> None:
        self._admission.take_body(nbytes)
        self.body_bytes += nbytes

    def take_reply(self, nbytes: int) -> None:
        self._admission.take_reply(nbytes)
        self.reply_bytes += nbytes
