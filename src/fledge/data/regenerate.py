"""Replace the answers of a data set by the target's own.

A draft learns to predict what the target would generate: answers by another author teach the wrong
distribution. This module is the job (rows in, rows out, nothing lost or repeated), which any number
of processes share: each answers the shards that it claims, and takes over those of processes that
have died; one that finds all of them done merges the answers (`regenerate_files`). An `Answerer`
generates them: a server (`chat_servers`) or a model in this process (`decode.regenerate`).
"""

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fledge.core.claims import POLL_S, Claims
from fledge.core.errors import BadInput
from fledge.core.files import check_place
from fledge.core.terminal import counted
from fledge.data.dialogue import Answerer, Dialogue, EndedTask, Sampling, Task
from fledge.data.drops import BadRow
from fledge.data.regenerate_files import JobFiles, Shard, Summary
from fledge.data.sources import Row, fingerprint, make_parts

_FORMAT = 1
_SHARD_ROWS = 64  # rounded up to a multiple of the rows that are answered together
_REFRESH_S = 2.0  # how often a busy process reads what the others have done

Watch = Callable[[int, Summary], None]  # arguments: finished rows, figures so far


def regenerate(
    sources: list[str],
    out: Path,
    answerer: Answerer,
    sampling: Sampling,
    *,
    limit: int | None = None,
    exclude_truncated: bool = False,
    patience: int = 64,
    watch: Watch = lambda done, so_far: None,
    say: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Answer every row of `sources` once, resuming where earlier processes stopped, alongside any
    number of other processes.

    Rows that failed before are retried. A failed row does not end the job, but `patience`
    consecutive failures do if the server does not answer at all.
    """
    check_out(out, sources)
    data = {"sources": sources, "fingerprint": fingerprint(sources), "limit": limit}
    settings = {"format": _FORMAT, "data": data, "target": answerer.identity()}
    settings["sampling"] = asdict(sampling)
    job = JobFiles(out, settings, exclude_truncated=exclude_truncated)
    job.check()
    source = ShardedRows(sources, limit=limit)
    with job.shared() as claims:
        with job.alone(claims):
            if (earlier := job.finished(source.rows)) is not None:
                return earlier
            job.begin()
        size = -(-_SHARD_ROWS // answerer.together) * answerer.together
        share = _Share(job, source, size, answerer, sampling, patience, watch)
        share.work(claims, say)
        with job.alone(claims):
            job.finish(share.shards.values(), share.summary)
    return share.summary


def check_out(out: Path, sources: list[str]) -> None:
    """Refuse an output path that cannot work, before a target is loaded."""
    check_place(out, read=sources)
    if not out.name.endswith(".jsonl"):
        raise BadInput(f"'{out.name}' is not a .jsonl file", where="--out")


class ShardedRows:
    """All rows of some sources, or the first `limit`, by number; fastest when read in order."""

    def __init__(self, sources: list[str], *, limit: int | None = None) -> None:
        self._parts = make_parts(sources)
        self._starts, rows = [0], 0  # first row of each part
        for part in self._parts:
            rest = None if limit is None else limit - rows
            rows += sum(1 for _ in itertools.islice(part.rows(), rest))
            self._starts.append(rows)
        self.rows = rows
        self._stream: Iterator[Row] = iter(())
        self._next = rows  # the row that the stream yields next

    def shards(self, size: int) -> list[range]:
        """The numbers of consecutive rows, `size` at a time."""
        return [range(n, min(self.rows, n + size)) for n in range(0, self.rows, size)]

    def read(self, numbers: range) -> list[tuple[int, Row]]:
        """The rows with these numbers. Rows before them in their part are skipped, once."""
        part = self._part_of(numbers.start)
        if numbers.start < self._next or part > self._part_of(self._next):
            self._stream = itertools.chain.from_iterable(p.rows() for p in self._parts[part:])
            self._next = self._starts[part]
        begin, end = numbers.start - self._next, numbers.stop - self._next
        self._next = numbers.stop
        return list(zip(numbers, itertools.islice(self._stream, begin, end), strict=True))

    def _part_of(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1


class _Share:
    """One process's share of a job: it answers the rows of the shards that it claims.

    Rows that had failed before this process started are retried; those that fail while it runs are
    not.
    """

    def __init__(
        self,
        job: JobFiles,
        source: ShardedRows,
        size: int,
        answerer: Answerer,
        sampling: Sampling,
        patience: int,
        watch: Watch,
    ) -> None:
        self._job, self._source, self._answerer = job, source, answerer
        self._keep_reasoning, self._watch = sampling.keep_reasoning, watch
        self._patience = self._failures_left = patience
        self._size, self.summary = size, Summary(source.rows)
        names = map(Shard.name, source.shards(size))
        self.shards = {name: Shard(job.parts / f"{name}.jsonl") for name in names}
        self._finished_before = self._finished = sum(s.finished for s in self.shards.values())
        self._begin = self._refreshed_at = time.perf_counter()
        self._report_progress()

    def work(self, claims: Claims, say: Callable[[str], None]) -> None:
        """Answer rows until every shard is done, by this process or another."""
        left, reported = dict.fromkeys(self.shards), 0
        while left:
            idle = True
            free = claims.free(left, self._is_done)
            for name in free:
                # rows that are answered together: claim the next shard when this one is done
                names = [name] if self._answerer.together > 1 else itertools.chain([name], free)
                self._answerer.run(self._tasks(names), self._report)
                idle = False
            if left and idle:  # else some may be done or free again by now
                if len(left) != reported:
                    what = counted(len(left), "shard")
                    say(f"waiting for {what} that other processes are answering")
                reported = len(left)
                time.sleep(POLL_S)
                self._refresh()
                self._report_progress()
        self._finished = self.summary.rows  # the last process may find the parts already removed
        self._report_progress()

    def _is_done(self, name: str) -> bool:
        """Whether a shard is done; its file shows what others did, until the job is finished."""
        shard = self.shards[name]
        if not shard.is_done:
            self._finished += shard.refresh()
        # checked after reading: parts are removed only once the job is finished
        return shard.is_done or not self._job.is_begun

    def _refresh(self) -> None:
        """Read what the others have written."""
        self._refreshed_at = time.perf_counter()
        for path in self._job.shards():
            shard = self.shards.get(path.stem)
            if shard is not None and not shard.is_done:
                self._finished += shard.refresh()

    def _tasks(self, names: Iterable[str]) -> Iterator[Task]:
        """Yield the rows that are not done yet; rows that cannot be asked are recorded as failed.

        If a killed process left a group unfinished that is answered together, its done rows are
        included: sampled answers are then the same as without the interruption.
        """
        for name in names:
            shard = self.shards[name]
            rows = iter(self._source.read(shard.rows))
            while group := list(itertools.islice(rows, self._answerer.together)):
                known = shard.good | shard.failed_before | shard.failed
                unfinished = any(number not in known for number, _ in group)
                for number, (place, row) in group:
                    done = number in shard.good
                    if unfinished or not done:
                        yield from self._task(number, place, row, done=done)

    def _task(self, number: int, place: str, row: Any, *, done: bool) -> Iterator[Task]:
        try:
            if isinstance(row, BadRow):
                raise row
            dialogue = Dialogue(row, keep_reasoning=self._keep_reasoning)
        except BadRow as bad:
            self._fail(number, place, None if isinstance(row, BadRow) else row, bad)
        else:
            yield Task(number, place, row, dialogue, done)

    def _report(self, outcome: EndedTask) -> None:
        task, bad = outcome.task, outcome.bad
        if task.done:
            return
        if bad is not None:
            self._fail(task.number, task.place, task.row, bad)
            self._failures_left = self._failures_left - 1 if outcome.hopeless else self._patience
            if self._failures_left <= 0:
                raise BadInput(
                    f"{self._patience} rows one after another failed: {bad.reason} ({bad.detail})",
                    fix="see to the server and run the same command again: nothing done is lost",
                )
            return
        dialogue = task.dialogue
        self._failures_left = self._patience
        self.summary.answered_now += 1
        self.summary.tokens_now += dialogue.tokens
        facts = {"truncated": dialogue.truncated, "tokens": dialogue.tokens}
        self._add(task.number, {**facts, "value": dialogue.new_row(task.row)}, good=True)

    def _fail(self, number: int, place: str, row: Any, bad: BadRow) -> None:
        self.summary.failed_now += 1
        value = {"place": place, "reason": bad.reason, "detail": bad.detail, "original": row}
        self._add(number, value, good=False)

    def _add(self, number: int, value: dict[str, Any], *, good: bool) -> None:
        first = number - number % self._size
        name = Shard.name(range(first, min(self.summary.rows, first + self._size)))
        self._finished += self.shards[name].add(number, value, good=good)
        if time.perf_counter() - self._refreshed_at > _REFRESH_S:
            self._refresh()
        self._report_progress()

    def _report_progress(self) -> None:
        summary = self.summary
        done_here = summary.answered_now + summary.failed_now
        summary.others_now = max(0, self._finished - self._finished_before - done_here)
        summary.seconds_now = time.perf_counter() - self._begin
        self._watch(self._finished, summary)
