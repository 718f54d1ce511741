"""One process's share of a regeneration: it answers the shards that it claims.

The journal records what is done, by any process. A shard whose process has died is taken over where
that process stopped. Rows that had failed before this process started are retried; those that fail
while it runs are not.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fledge.core.claims import POLL_S, Claims
from fledge.core.errors import BadInput
from fledge.core.terminal import counted
from fledge.data.drops import BadRow
from fledge.data.regenerate_files import JobFiles, Summary
from fledge.data.regenerate_task import Answerer, Dialogue, EndedTask, Task
from fledge.data.rows import NumberedRow, Shards

Watch = Callable[[int, Summary], None]  # arguments: finished rows, figures so far
_REFRESH_S = 2.0  # how often a busy process reads what the others have done


class Share:
    """Answers the rows that this process claims."""

    def __init__(
        self,
        job: JobFiles,
        shards: Shards,
        answerer: Answerer,
        *,
        keep_reasoning: bool,
        patience: int,
        watch: Watch,
    ) -> None:
        self.journal, self.summary = job.journal(), Summary(shards.rows)
        self._job, self._shards, self._answerer = job, shards, answerer
        self._keep_reasoning, self._watch = keep_reasoning, watch
        self._patience = self._failures_left = patience
        self._to_retry = dict(self.journal.failed())  # failed before, not yet retried
        self._own_shards: set[str] = set()  # shards that were answered here
        self._finished_before = self._finished_rows
        self._begin = self._refreshed_at = time.perf_counter()
        self._report_progress()

    def work(self, claims: Claims, say: Callable[[str], None]) -> None:
        """Answer rows until every shard is done, by this process or another."""
        left, reported = dict.fromkeys(self._shards.names), 0
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
        # by difference: the last process may find the parts already removed
        done_here = self.summary.answered_now + self.summary.failed_now
        self.summary.others_now = max(0, self.summary.rows - self._finished_before - done_here)

    def _is_done(self, name: str) -> bool:
        """Whether a shard is done; the parts show what others did, until the job is finished."""
        numbers = self._shards.numbers(name)
        if not all(map(self._is_finished, numbers)):
            self._refresh()
            # checked after reading: parts are removed only once the job is finished
            return all(map(self._is_finished, numbers)) or not self._job.is_begun
        if name in self._own_shards:  # about to be released: others must see it as done
            self.journal.sync()
            self._own_shards.remove(name)
        return True

    def _is_finished(self, row: int) -> bool:
        return row in self.journal.entries and row not in self._to_retry

    def _refresh(self) -> None:
        """Read what the others have written, unless the job is finished and its parts removed."""
        self._refreshed_at, before = time.perf_counter(), self._finished_rows
        for row in self.journal.read_new() if self._job.is_begun else ():
            self._mark_retried(row)
        self.summary.others_now += self._finished_rows - before

    def _mark_retried(self, row: int) -> None:
        if row in self._to_retry and self.journal.entries[row] != self._to_retry[row]:
            del self._to_retry[row]

    @property
    def _finished_rows(self) -> int:
        return len(self.journal.entries) - len(self._to_retry)

    def _tasks(self, names: Iterable[str]) -> Iterator[Task]:
        for name in names:
            self._own_shards.add(name)
            rows = iter(self._shards.read(name))
            while group := list(itertools.islice(rows, self._answerer.together)):
                yield from self._group_tasks(group)

    def _group_tasks(self, group: list[NumberedRow]) -> Iterator[Task]:
        """Yield the rows that are not done yet; rows that cannot be asked are recorded as failed.

        If a killed process left a group unfinished, its done rows are included, too: answers that
        are sampled or computed together are then the same as without the interruption.
        """
        entries = {number: self.journal.entries.get(number) for number, _ in group}
        unfinished = None in entries.values()  # else only failures are retried
        for number, (place, row) in group:
            entry = entries[number]
            done = entry is not None and entry.good
            if done and not unfinished:
                continue
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
        facts = {"truncated": dialogue.truncated, "tokens": dialogue.tokens}
        value = dialogue.new_row(task.row)
        self._failures_left = self._patience
        self.summary.answered_now += 1
        self.summary.tokens_now += dialogue.tokens
        self._add(task.number, {**facts, "value": value}, good=True)

    def _fail(self, number: int, place: str, row: Any, bad: BadRow) -> None:
        value = {"place": place, "reason": bad.reason, "detail": bad.detail, "original": row}
        self.summary.failed_now += 1
        self._add(number, value, good=False)

    def _add(self, number: int, value: dict[str, Any], *, good: bool) -> None:
        self.journal.add(number, value, good=good)
        self._mark_retried(number)
        if time.perf_counter() - self._refreshed_at > _REFRESH_S:
            self._refresh()
        self._report_progress()

    def _report_progress(self) -> None:
        self.summary.seconds_now = time.perf_counter() - self._begin
        self._watch(min(self._finished_rows, self.summary.rows), self.summary)
