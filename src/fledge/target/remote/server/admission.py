"""What a server holds at once, and the counters that show it.

A request is counted from its headers, before its body is read, to the last byte of its reply, so
that neither slow senders nor slow readers can make the server hold more than its limits.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Reserve = Callable[..., None]  # of the amounts named by its keywords; raises `QueueFull`


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


class Admission:
    """Requests in progress, and the bytes of their bodies and replies. On the event loop only."""

    def __init__(self, limits: Limits, metrics: "Metrics", expected_s: Callable[[], float]) -> None:
        self._most = {
            "requests": limits.max_requests,
            "body_bytes": limits.max_bodies_bytes,
            "reply_bytes": limits.max_reply_bytes,
        }
        self._held = Counter(dict.fromkeys(self._most, 0))
        self._metrics, self._expected_s = metrics, expected_s

    @contextmanager
    def place(self) -> Iterator[Reserve]:
        """A place for one request; what it reserves is given back when the context ends. What
        exceeds a limit by itself is admitted if nothing else is held: it could never be sent
        otherwise."""
        reserved: Counter[str] = Counter()

        def reserve(**amounts: int) -> None:
            for name, amount in amounts.items():
                if self._held[name] and self._held[name] + amount > self._most[name]:
                    raise QueueFull(self._expected_s())
            reserved.update(amounts)
            self._add(Counter(amounts))

        try:
            reserve(requests=1)
            yield reserve
        finally:
            self._add(Counter({name: -amount for name, amount in reserved.items()}))

    def _add(self, amounts: Counter[str]) -> None:
        self._held.update(amounts)
        self._metrics.set(**{f"pending_{name}": held for name, held in self._held.items()})


_METRICS = {
    "http_requests_total": "Requests by path and status.",
    "passes_total": "Passes of the target.",
    "pass_seconds_total": "Seconds spent in passes, encoding included.",
    "failed_passes_total": "Passes that raised an error.",
    "questions_total": "Questions answered; more than passes where some were merged.",
    "tokens_total": "Tokens that were asked about, padding included.",
    "reply_bytes_total": "Bytes of answers, by the way they were sent.",
    "abandoned_total": "Questions whose client left before their turn came.",
    "queue_requests": "Questions that wait for the target.",
    "pending_requests": "Requests between arrival and the end of their reply.",
    "pending_body_bytes": "Bytes of the bodies of pending requests.",
    "pending_reply_bytes": "Bytes of the replies to pending requests.",
}


class Metrics:
    """Counters (`*_total`) and gauges. Thread-safe."""

    def __init__(self) -> None:
        labelled = ("http_requests_total", "reply_bytes_total")
        self._values = {(name, ""): 0.0 for name in _METRICS if name not in labelled}
        self._lock = threading.Lock()

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        key = name, text and f"{{{text}}}"
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, name: str) -> float:
        return self._values[name, ""]

    def set(self, **values: float) -> None:
        with self._lock:
            self._values |= {(name, ""): value for name, value in values.items()}

    def text(self) -> str:
        """All values, as Prometheus reads them."""
        with self._lock:
            values = sorted(self._values.items())
        lines = []
        for name, description in _METRICS.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP fledge_{name} {description}", f"# TYPE fledge_{name} {kind}"]
            lines += [
                f"fledge_{key}{labels} {v:.15g}" for (key, labels), v in values if key == name
            ]
        return "\n".join(lines) + "\n"
