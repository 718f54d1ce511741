"""What a server holds at once, and the counters that show it.

A request keeps its place from its head, before its body is read, to the last byte of its reply, so
that neither slow senders nor slow readers can make the server hold more than its limits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
    kept_answers: int = 0  # for clients that ask the same question a moment later


class QueueFull(Exception):  # noqa: N818  (an answer to the client, not a fault)
    """The server is at its limits: retry after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full for about {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


@dataclass
class Place:
    """One request's share of the limits."""

    admission: "Admission"
    body_bytes: int = 0
    reply_bytes: int = 0

    def take_body(self, nbytes: int) -> None:
        self.admission.take(body_bytes=nbytes)
        self.body_bytes += nbytes

    def take_reply(self, nbytes: int) -> None:
        self.admission.take(reply_bytes=nbytes)
        self.reply_bytes += nbytes


class Admission:
    """Requests in progress, and the bytes of their bodies and replies. On the event loop only."""

    def __init__(self, limits: Limits, metrics: "Metrics", expected_s: Callable[[], float]) -> None:
        self._most = {
            "requests": limits.max_requests,
            "body_bytes": limits.max_bodies_bytes,
            "reply_bytes": limits.max_reply_bytes,
        }
        self._held = dict.fromkeys(self._most, 0)
        self._metrics, self._expected_s = metrics, expected_s

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place for one request; raises `QueueFull` if there is none."""
        self.take(requests=1)
        place = Place(self)
        try:
            yield place
        finally:
            self._count(requests=-1, body_bytes=-place.body_bytes, reply_bytes=-place.reply_bytes)

    def take(self, **amounts: int) -> None:
        """Reserve room, or raise `QueueFull`. What exceeds a limit by itself is admitted if nothing
        else is held: it could never be sent otherwise."""
        for name, amount in amounts.items():
            if self._held[name] and self._held[name] + amount > self._most[name]:
                raise QueueFull(self._expected_s())
        self._count(**amounts)

    def _count(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self._held[name] += amount
        self._metrics.set(**{f"pending_{name}": held for name, held in self._held.items()})


_HELP = {
    "http_requests_total": ("counter", "Requests by path and status."),
    "passes_total": ("counter", "Passes of the target."),
    "pass_seconds_total": ("counter", "Seconds spent in passes, encoding included."),
    "failed_passes_total": ("counter", "Passes that raised an error."),
    "questions_total": ("counter", "Questions answered; more than passes where some were merged."),
    "tokens_total": ("counter", "Tokens that were asked about, padding included."),
    "reply_bytes_total": ("counter", "Bytes of answers, by the way they were sent."),
    "abandoned_total": ("counter", "Questions whose client left before their turn came."),
    "queue_requests": ("gauge", "Questions that wait for the target."),
    "pending_requests": ("gauge", "Requests between arrival and the end of their reply."),
    "pending_body_bytes": ("gauge", "Bytes of the bodies of pending requests."),
    "pending_reply_bytes": ("gauge", "Bytes of the replies to pending requests."),
    "connections": ("gauge", "Open connections."),
    "dropped_connections_total": ("counter", "Connections closed for being too many or too slow."),
}


class Metrics:
    """Counters and gauges. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        for name in _HELP:
            if name not in ("http_requests_total", "reply_bytes_total"):
                self._values[name, ""] = 0

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = name, ",".join(f'{label}="{value}"' for label, value in labels.items())
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def value(self, name: str) -> float:
        return self._values[name, ""]

    def set(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._values[name, ""] = value

    def text(self) -> str:
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, (kind, description) in _HELP.items():
            lines += [f"# HELP fledge_{name} {description}", f"# TYPE fledge_{name} {kind}"]
            lines += [
                f"fledge_{key}{{{labels}}} {value:.15g}" if labels else f"fledge_{key} {value:.15g}"
                for (key, labels), value in sorted(values.items())
                if key == name
            ]
        return "\n".join(lines) + "\n"
