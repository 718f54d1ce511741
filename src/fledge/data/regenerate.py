"""Rewrite the answers of a data set with the target's own words.

A draft learns to say what the target would say: answers by another author teach the wrong thing.
This file holds the job (rows in, rows out, nothing lost or repeated). An `Answerer` answers:
a server (`regenerate_http`) or a model in this process (`decode.regenerate`).

    answers.jsonl.parts/     what is done so far (`journal`); gone when all rows are good
    answers.jsonl            the good rows in the data's order
    answers.failed.jsonl     the others with their reasons, if any
    answers.manifest.json    data, target, template, sampling, counts
"""

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from fledge import __version__
from fledge.core.errors import BadInput
from fledge.core.expected import Table, Text, Whole, shown
from fledge.core.files import atomic_file, check_place, write_json
from fledge.core.reading import read_json
from fledge.core.text import counted
from fledge.data.drops import BadRow, DropReport
from fledge.data.journal import Journal, json_line
from fledge.data.regenerate_dialogue import Dialogue
from fledge.data.sources import Row, fingerprint, make_parts

_FORMAT = 1
# What the journal says of a row, and the manifest of a job that is over.
_GOOD = Table({"tokens": Whole(), "value": Table()})
_FAILED = Table({"place": Text(), "reason": Text(), "detail": Text()})
_RESULT = Table({"written": Whole(), "truncated": Whole(), "tokens": Whole()})


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn, and what becomes of reasoning."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    keep_reasoning: bool = True
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A row to be answered."""

    number: int  # in the data, from 0
    place: str
    row: dict[str, Any]
    dialogue: Dialogue
    done: bool = False  # by an earlier process: here for the sake of those asked beside it


@dataclass(frozen=True)
class EndedTask:
    """A finished task: its dialogue is complete, or there is a reason why not."""

    task: Task
    bad: BadRow | None = None
    hopeless: bool = False  # any other row would have failed too: the server is down


class Answerer(Protocol):
    """Answers tasks: takes new ones while it has room, and reports each when it is finished."""

    together: int  # rows, from the data's first on, whose answers may depend on one another

    def identity(self) -> dict[str, Any]:
        """Target and template: what must not change between a job and its continuation."""
        ...

    def run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None: ...


@dataclass
class Summary:
    """What a job came to; the manifest keeps it."""

    rows: int  # of the data
    written: int = 0
    truncated: int = 0  # answers that the length limit cut short, written or not
    excluded: int = 0  # of these, left out
    tokens: int = 0  # generated, in the good rows
    failed: DropReport = field(default_factory=DropReport)
    answered_now: int = 0  # by this process
    failed_now: int = 0
    tokens_now: int = 0
    seconds_now: float = 0.0

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        report = value.pop("failed")
        reasons = {"reasons": report["counts"], "examples": report["examples"]}
        return {**value, "failed": self.failed.dropped, **reasons}


Watch = Callable[[int, Summary], None]  # rows that are over, and the figures so far
_Numbered = tuple[int, Row]


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
) -> Summary:
    """Answer every row of `sources` once, going on wherever an earlier process stopped.

    Rows that failed before are tried again. A row that fails does not end the job; `patience` of
    them in a row, because the server does not answer at all, do.
    """
    check_out(out, sources)
    data = {"sources": sources, "fingerprint": fingerprint(sources), "limit": limit}
    settings = {"format": _FORMAT, "data": data, "target": answerer.identity()}
    settings["sampling"] = asdict(sampling)
    job = _Job(out, settings, exclude_truncated=exclude_truncated)
    total = sum(1 for _ in _rows(sources, limit))
    with job.alone():
        if (earlier := job.finished(total)) is not None:
            return earlier
        job.begin()
        journal, summary = Journal(job.parts, good=_GOOD, failed=_FAILED), Summary(total)
        run = _Run(journal, summary, patience, watch)
        try:
            rows = _groups(_rows(sources, limit), answerer.together)
            answerer.run(run.tasks(rows, keep_reasoning=sampling.keep_reasoning), run.report)
        finally:
            journal.close()
        job.finish(journal, summary)
    return summary


def check_out(out: Path, sources: list[str]) -> None:
    """Refuse an output path that cannot work, before a target is loaded."""
    check_place(out, read=sources)
    if not out.name.endswith(".jsonl"):
        raise BadInput(f"'{out.name}' is not a .jsonl file", where="--out")


def _rows(sources: list[str], limit: int | None) -> Iterator[_Numbered]:
    every = (row for part in make_parts(sources) for row in part.rows())
    return enumerate(itertools.islice(every, limit))


def _groups(rows: Iterator[_Numbered], size: int) -> Iterator[list[_Numbered]]:
    while group := list(itertools.islice(rows, size)):
        yield group


class _Run:
    """One process's share of a job."""

    def __init__(self, journal: Journal, summary: Summary, patience: int, watch: Watch) -> None:
        self._journal, self._summary, self._watch = journal, summary, watch
        self._patience = self._left = patience
        self._begin = time.perf_counter()
        self._over = sum(1 for _ in journal.good())
        watch(self._over, summary)

    def tasks(self, groups: Iterator[list[_Numbered]], *, keep_reasoning: bool) -> Iterator[Task]:
        """Rows that are not done yet; those that cannot be asked are noted on the way.

        Of a group that a killed process left in the middle the done ones come too: answers that are
        drawn, or computed together, are then what they would have been without the kill.
        """
        for group in groups:
            known = {number: self._journal.entries.get(number) for number, _ in group}
            begun = None in known.values()  # else nothing but failures to try again
            for number, (place, row) in group:
                entry = known[number]
                done = entry is not None and entry.good
                if done and not begun:
                    continue
                try:
                    if isinstance(row, BadRow):
                        raise row
                    dialogue = Dialogue(row, keep_reasoning=keep_reasoning)
                except BadRow as bad:
                    self._fail(number, place, None if isinstance(row, BadRow) else row, bad)
                else:
                    yield Task(number, place, row, dialogue, done)

    def report(self, outcome: EndedTask) -> None:
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
        self._journal.add(task.number, {**facts, "value": value}, good=True)
        self._left = self._patience
        self._summary.answered_now += 1
        self._summary.tokens_now += dialogue.tokens
        self._step()

    def _fail(self, number: int, place: str, row: Any, bad: BadRow) -> None:
        value = {"place": place, "reason": bad.reason, "detail": bad.detail, "original": row}
        self._journal.add(number, value, good=False)
        self._summary.failed_now += 1
        self._step()

    def _step(self) -> None:
        self._over += 1
        self._summary.seconds_now = time.perf_counter() - self._begin
        self._watch(self._over, self._summary)


class _Job:
    """The files of a job, from its first process to its last."""

    def __init__(self, out: Path, settings: dict[str, Any], *, exclude_truncated: bool) -> None:
        stem = out.name.removesuffix(".jsonl")
        self.out, self._settings, self._exclude = out, settings, exclude_truncated
        self.parts = out.with_name(f"{out.name}.parts")
        self._manifest = out.with_name(f"{stem}.manifest.json")
        self._failed = out.with_name(f"{stem}.failed.jsonl")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time; nothing stays behind of a job that never began, or is over."""
        self.parts.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.parts / ".lock", timeout=0):
                try:
                    yield
                finally:
                    if not self._begun.is_file():
                        shutil.rmtree(self.parts)
        except Timeout:
            raise BadInput("another process is working on it", where=str(self.parts)) from None

    @property
    def _begun(self) -> Path:
        return self.parts / "settings.json"

    def finished(self, rows: int) -> Summary | None:
        """The summary of a job that is over; None while there is something to do."""
        if self._begun.is_file():
            return None
        if not self._manifest.is_file():
            if self.out.exists():
                raise BadInput(
                    "exists, and was not made by this command",
                    where=str(self.out),
                    fix="name another --out",
                )
            return None
        what = "the manifest"
        held = read_json(self._manifest, Table({"result": _RESULT}), what=what, finite=False)
        self._compare(held, self._manifest)
        kept = {name: held["result"][name] for name in ("written", "truncated", "tokens")}
        if self._exclude and kept["truncated"]:
            raise BadInput(
                f"finished, with {counted(kept['truncated'], 'truncated answer')} in it",
                where=str(self.out),
                fix="leave out the rows whose `finish` is `length`, or name another --out",
            )
        return Summary(rows, **kept)

    def begin(self) -> None:
        """Write down what this job is, or compare with what it was."""
        if self._begun.is_file():
            held = read_json(self._begun, what="the record of the job", finite=False)
            self._compare(held, self._begun)
        else:
            write_json(self._begun, self._settings)

    def _compare(self, held: dict[str, Any], path: Path) -> None:
        for section, own in self._settings.items():
            theirs = held.get(section)
            if theirs == json.loads(json.dumps(own)):
                continue
            pairs = [(section, own, theirs)]
            if isinstance(own, dict) and isinstance(theirs, dict):
                names = sorted({*own, *theirs})
                pairs = [(f"{section}.{n}", own.get(n), theirs.get(n)) for n in names]
            differing = [(n, a, b) for n, a, b in pairs if a != b]
            # Where the data lies does not matter, what it holds does; an absent value is none.
            if not differing or (name := differing[0][0]) == "data.sources":
                continue
            _, ours, old = differing[0]
            raise BadInput(
                f"begun with another {name}: {shown(old)}, not {shown(ours)}",
                where=str(path),
                fix="name another --out, or give the old settings",
            )

    def finish(self, journal: Journal, summary: Summary) -> None:
        """The good rows in the data's order, the others with their reasons, the manifest."""
        summary.tokens = summary.written = summary.truncated = summary.excluded = 0
        with atomic_file(self.out) as handle:
            for row, entry in journal.good():
                if row >= summary.rows:  # of no row that there is
                    continue
                record = entry.read()
                summary.tokens += record["tokens"]
                summary.truncated += entry.truncated
                if entry.truncated and self._exclude:
                    summary.excluded += 1
                    continue
                handle.write(json_line(record["value"]))
                summary.written += 1
        failures = [entry.read() for _, entry in journal.failed()]
        for failure in failures:
            summary.failed.add(failure["place"], BadRow(failure["reason"], failure["detail"]))
        summary.failed.kept = summary.written + summary.excluded
        if failures:
            with atomic_file(self._failed) as handle:
                for failure in failures:
                    handle.write(json_line(failure))
        else:
            self._failed.unlink(missing_ok=True)
        result = {**summary.to_json(), "exclude_truncated": self._exclude}
        write_json(self._manifest, {"fledge": __version__, **self._settings, "result": result})
        if not failures and not summary.excluded:  # else a later run may still want the parts
            self._begun.unlink()
