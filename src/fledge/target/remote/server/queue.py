"""The queue of questions in front of one worker thread, what a server holds at once, and the
counters that show it.

A request is counted from its headers, before its body is read, to the last byte of its reply, so
that neither slow senders nor slow readers can make the server hold more than its limits. Everything
here runs on the event loop, except the target's passes, which run on the worker.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from fledge.target.remote.protocol import Question
from fledge.target.remote.wire import Message, WireError

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
    """Requests in progress, and the bytes of their bodies and replies."""

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
    "reply_bytes_total": "Bytes of answers.",
    "abandoned_total": "Questions whose client left before their turn came.",
    "queue_requests": "Questions that wait for the target.",
    "pending_requests": "Requests between arrival and the end of their reply.",
    "pending_body_bytes": "Bytes of the bodies of pending requests.",
    "pending_reply_bytes": "Bytes of the replies to pending requests.",
}


class Metrics:
    """Counters (`*_total`) and gauges. Thread-safe."""

    def __init__(self) -> None:
        self._values = {(name, ""): 0.0 for name in _METRICS if name != "http_requests_total"}
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


@dataclass(eq=False)
class _Job:
    question: Question
    done: asyncio.Future[Message]
    alone: bool  # runs in a pass of its own
    listeners: int = 0  # requests waiting for it: a repeated request joins the first one
    asked: int = 0  # requests for it so far


class AnswerQueue:
    """Runs one pass at a time; merges small questions that are waiting together."""

    def __init__(
        self,
        compute: Callable[[Sequence[Question]], list[Message]],
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._compute, self._metrics, self._limits = compute, metrics, limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fledge-target")
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[str, _Job] = {}
        self._kept: deque[_Job] = deque()  # answered, and to be asked for again
        self._runner: asyncio.Task[None] | None = None
        self.admission = Admission(limits, metrics, self._expected_s)
        self._tokens_per_s = 1000.0  # a running average over passes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def answer(self, question: Question) -> Message:
        """Wait for the answer. A question whose id is already queued is not computed twice."""
        job = self._jobs.get(question.request_id)
        if job is not None and not job.question.asks_the_same(question):
            raise WireError(f"request {question.request_id} is under way with another question")
        if job is None:
            done = asyncio.get_running_loop().create_future()
            job = _Job(question, done, question.alone)
            self._jobs[question.request_id] = job
            self._waiting.append(job)
            self._update_metrics()
        job.listeners, job.asked = job.listeners + 1, job.asked + 1
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await asyncio.shield(job.done)
        finally:
            job.listeners -= 1
            if not job.listeners:
                self._leave(job)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _leave(self, job: _Job) -> None:
        """Drop a job that no request waits for any more, whether answered or abandoned; or keep its
        answer for a while, if further clients are to ask for it."""
        if job in self._kept:
            self._kept.remove(job)
        answered = job.done.done() and job.done.exception() is None
        if answered and job.asked < job.question.askers:
            self._kept.append(job)
            if len(self._kept) <= self._limits.kept_answers:
                return
            job = self._kept.popleft()
        self._jobs.pop(job.question.request_id, None)
        if job in self._waiting:
            self._waiting.remove(job)
            self._metrics.count("abandoned_total")
        self._update_metrics()

    async def _run(self) -> None:
        """Run passes, one at a time, until no question is waiting."""
        while self._waiting:
            jobs = self._next_group()
            self._update_metrics()
            await self._run_pass(jobs)
            del jobs  # frees the replies as soon as they are sent
        self._runner = None

    async def _run_pass(self, jobs: list[_Job]) -> None:
        questions = [job.question for job in jobs]
        begin = time.monotonic()
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._thread, self._compute, questions)
        [answers] = await asyncio.gather(call, return_exceptions=True)
        seconds = time.monotonic() - begin
        tokens = sum(question.rows.tokens for question in questions)
        self._tokens_per_s += 0.2 * (tokens / max(seconds, 1e-4) - self._tokens_per_s)
        self._metrics.count("passes_total")
        self._metrics.count("pass_seconds_total", seconds)
        if not isinstance(answers, BaseException):
            self._metrics.count("questions_total", len(jobs))
            self._metrics.count("tokens_total", tokens)
            for job, answer in zip(jobs, answers, strict=True):
                job.done.set_result(answer)
            return
        self._metrics.count("failed_passes_total")
        if len(jobs) == 1:
            jobs[0].done.set_exception(answers)
            jobs[0].done.exception()  # mark as retrieved: nobody may be waiting any more
            return
        for job in reversed(jobs):  # each again, in a pass of its own, if anybody waits for it
            job.alone = True
            if job.listeners:
                self._waiting.appendleft(job)
            else:
                self._metrics.count("abandoned_total")

    def _next_group(self) -> list[_Job]:
        """The oldest job and those queued after it that can share its pass: their rows have the
        same width, and all are packed or all padded."""
        first = self._waiting.popleft()
        group, tokens = [first], first.question.rows.tokens
        for job in [] if first.alone else list(self._waiting):
            more = job.question.rows.tokens
            alike = not job.alone and _form(job.question) == _form(first.question)
            if alike and tokens + more <= self._limits.merge_tokens:
                self._waiting.remove(job)
                group.append(job)
                tokens += more
        return group

    def _expected_s(self) -> float:
        tokens = sum(job.question.rows.tokens for job in self._waiting)
        return min(30.0, max(0.1, tokens / max(self._tokens_per_s, 1.0)))

    def _update_metrics(self) -> None:
        self._metrics.set(queue_requests=len(self._waiting))


def _form(question: Question) -> tuple[int, list[bool]]:
    rows = question.rows
    return rows.shape[1], [tensor is None for tensor in rows.arguments()]
