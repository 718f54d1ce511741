"""The queue of questions in front of one worker thread; `admission` bounds its size.

Everything here runs on the event loop, except the target's passes, which run on the worker.
"""

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fledge.target.remote.protocol import Question
from fledge.target.remote.server.admission import Admission, Limits, Metrics
from fledge.target.remote.server.answers import Target, may_merge, merged_tokens
from fledge.target.remote.wire import Message, WireError


@dataclass(eq=False)
class _Job:
    question: Question
    done: asyncio.Future[Message]
    alone: bool  # runs in a pass of its own
    listeners: int = 0  # requests waiting for it: a repeated request joins the first one
    asked: int = 0  # requests for it so far


class AnswerQueue:
    """Runs one pass at a time; merges small questions that are waiting together."""

    def __init__(self, target: Target, metrics: Metrics, limits: Limits) -> None:
        self._target, self._metrics, self._limits = target, metrics, limits
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
        call = loop.run_in_executor(self._thread, self._target.answer, questions)
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
        """The oldest job and those queued after it that can share its pass."""
        first = self._waiting.popleft()
        group, rows = [first], [first.question.rows]
        for job in [] if first.alone else list(self._waiting):
            more = [*rows, job.question.rows]
            fits = may_merge(rows[0], more[-1]) and merged_tokens(more) <= self._limits.merge_tokens
            if fits and not job.alone:
                self._waiting.remove(job)
                group.append(job)
                rows = more
        return group

    def _expected_s(self) -> float:
        tokens = sum(job.question.rows.tokens for job in self._waiting)
        return min(30.0, max(0.1, tokens / max(self._tokens_per_s, 1.0)))

    def _update_metrics(self) -> None:
        self._metrics.set(queue_requests=len(self._waiting))
