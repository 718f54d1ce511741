"""One process's share of a regeneration: the shards that it claims, while others claim others.

The journal says what is done, by whomever. A shard whose process is gone is taken over where that
process stopped. Rows that had failed before this process began are tried again, those that fail
meanwhile are not.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fledge.core.claims import POLL_S, Claims
from fledge.core.errors import BadInput
from fledge.core.text import counted
from fledge.data.drops import BadRow
from fledge.data.regenerate_dialogue import Dialogue
from fledge.data.regenerate_files import JobFiles, Summary
from fledge.data.regenerate_task import Answerer, EndedTask, Task
from fledge.data.shards import NumberedRow, Shards

Watch = Callable[[int, Summary], None]  # rows that are over, and the figures so far
_LOOK_S = 2.0  # how often a process at work looks what the others have done


class Share:
    """Answers what falls to this process."""

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
        self._patience = self._left = patience
        self._again = dict(self.journal.failed())  # rows that failed before, not yet tried again
        self._own: set[str] = set()  # shards that were answered here
        self._before = self._over
        self._begin = self._looked = time.perf_counter()
        self._show()

    def work(self, claims: Claims, say: Callable[[str], None]) -> None:
        """Until every shard is done, by this process or another."""
        left, told = dict.fromkeys(self._shards.names), 0
        while left:
            idle = True
            free = claims.free(left, self._is_done)
            for name in free:
                # where rows are answered together, the next shard is claimed when this one is done
                names = [name] if self._answerer.together > 1 else itertools.chain([name], free)
                self._answerer.run(self._tasks(names), self._report)
                idle = False
            if left and idle:  # else some are done by now, or nobody's again
                if len(left) != told:
                    what = counted(len(left), "shard")
                    say(f"waiting for {what} that other processes are answering")
                told = len(left)
                time.sleep(POLL_S)
                self._look()
                self._show()
        # who sees last that all is over finds no parts to count in
        here = self.summary.answered_now + self.summary.failed_now
        self.summary.others_now = max(0, self.summary.rows - self._before - here)

    def _is_done(self, name: str) -> bool:
        """What another process has done is seen in its part, until the job is over."""
        numbers = self._shards.numbers(name)
        if not all(map(self._is_over, numbers)):
            self._look()
            # asked after looking: nobody removes parts before the job is over
            return all(map(self._is_over, numbers)) or not self._job.is_begun
        if name in self._own:  # it is given up now: others must find it done
            self.journal.sync()
            self._own.remove(name)
        return True

    def _is_over(self, row: int) -> bool:
        return row in self.journal.entries and row not in self._again

    def _look(self) -> None:
        """See what the others have written, unless all is over and removed."""
        self._looked, before = time.perf_counter(), self._over
        for row in self.journal.read_new() if self._job.is_begun else ():
            self._tried(row)
        self.summary.others_now += self._over - before

    def _tried(self, row: int) -> None:
        if row in self._again and self.journal.entries[row] != self._again[row]:
            del self._again[row]

    @property
    def _over(self) -> int:
        return len(self.journal.entries) - len(self._again)

    def _tasks(self, names: Iterable[str]) -> Iterator[Task]:
        for name in names:
            self._own.add(name)
            rows = iter(self._shards.read(name))
            while group := list(itertools.islice(rows, self._answerer.together)):
                yield from self._group(group)

    def _group(self, group: list[NumberedRow]) -> Iterator[Task]:
        """Rows that are not done yet; those that cannot be asked are noted on the way.

        Of a group that a killed process left in the middle the done ones come too: answers that are
        drawn, or computed together, are then what they would have been without the kill.
        """
        known = {number: self.journal.entries.get(number) for number, _ in group}
        begun = None in known.values()  # else nothing but failures to try again
        for number, (place, row) in group:
            entry = known[number]
            done = entry is not None and entry.good
            if done and not begun:
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
            self._left = self._left - 1 if outcome.hopeless else self._patience
            if self._left <= 0:
                raise BadInput(
                    f"{self._patience} rows one after another failed: {bad.reason} ({bad.detail})",
                    fix="see to the server and run the same command again: nothing done is lost",
                )
            return
        dialogue = task.dialogue
        facts = {"truncated": dialogue.truncated, "tokens": dialogue.tokens}
        value = dialogue.new_row(task.row)
        self._left = self._patience
        self.summary.answered_now += 1
        self.summary.tokens_now += dialogue.tokens
        self._add(task.number, {**facts, "value": value}, good=True)

    def _fail(self, number: int, place: str, row: Any, bad: BadRow) -> None:
        value = {"place": place, "reason": bad.reason, "detail": bad.detail, "original": row}
        self.summary.failed_now += 1
        self._add(number, value, good=False)

    def _add(self, number: int, value: dict[str, Any], *, good: bool) -> None:
        self.journal.add(number, value, good=good)
        self._tried(number)
        if time.perf_counter() - self._looked > _LOOK_S:
            self._look()
        self._show()

    def _show(self) -> None:
        self.summary.seconds_now = time.perf_counter() - self._begin
        self._watch(min(self._over, self.summary.rows), self.summary)
