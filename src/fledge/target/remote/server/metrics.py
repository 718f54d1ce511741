"""A server's counters and gauges, in the text format of Prometheus."""

import threading

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

    def set(self, **values: float) -> None:
        with self._lock:
            for name, value in values.items():
                self._values[name, ""] = value

    def passed(self, questions: int, tokens: int, seconds: float, *, failed: bool) -> None:
        """Record one pass of the target."""
        self.count("passes_total")
        self.count("pass_seconds_total", seconds)
        if failed:
            self.count("failed_passes_total")
        else:
            self.count("questions_total", questions)
            self.count("tokens_total", tokens)

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
