"""Replace the answers of a data set by the target's own.

A draft learns to predict what the target would generate: answers by another author teach the wrong
distribution. Any number of processes share a job: each answers the shards of rows that it claims
(`core.claims`), and takes over those of processes that have died; one that finds all of them done
merges the answers. An `Answerer` generates them: a server (`chat_servers`) or a model in this
process (`decode.regenerate`).

    answers.jsonl.parts/     removed when all rows are good
        settings.json        what must not change while the job is unfinished
        TIME-ID.jsonl        the rows that one process has finished (`journal`)
    answers.jsonl            the good rows in the order of the data
    answers.failed.jsonl     the others with their reasons, if any
    answers.manifest.json    data, target, template, sampling, counts
"""

import bisect
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge import __version__
from fledge.core.claims import POLL_S, Claims
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file, check_place, removed, write_json
from fledge.core.reading import Expected, Table, Text, Whole, read_json, shown
from fledge.core.terminal import counted
from fledge.data import journal
from fledge.data.dialogue import Answerer, Dialogue, EndedTask, Sampling, Task
from fledge.data.drops import BadRow, DropReport
from fledge.data.sources import Row, fingerprint, make_parts

_FORMAT = 1
_SHARD_ROWS = 64  # rounded up to a multiple of the rows that are answered together
_REFRESH_S = 2.0  # how often a busy process reads what the others have done
_LINES: dict[bool, Expected] = {  # the line of a row that is good, or has failed
    True: Table({"tokens": Whole(), "value": Table()}),
    False: Table({"place": Text(), "reason": Text(), "detail": Text()}),
}
_FIGURES = ("written", "truncated", "excluded", "tokens")
_RESULT = Table({**dict.fromkeys(_FIGURES, Whole()), "reasons": Table(), "examples": Table()})


@dataclass
class Summary:
    """The result of a job, which the manifest stores, and this process's contribution to it."""

    rows: int  # in the data
    written: int = 0
    truncated: int = 0  # answers that the length limit cut short, written or not
    excluded: int = 0  # truncated answers that were left out
    tokens: int = 0  # generated, in the good rows
    failed: DropReport = field(default_factory=DropReport)
    answered_now: int = 0  # by this process
    failed_now: int = 0
    tokens_now: int = 0
    seconds_now: float = 0.0
    others_now: int = 0  # rows that other processes have finished meanwhile

    def to_json(self) -> dict[str, Any]:
        value, failed = asdict(self), self.failed
        del value["failed"]
        reasons = {"reasons": failed.counts, "examples": failed.examples}
        return {**value, "failed": failed.dropped, **reasons}

    def result(self) -> dict[str, Any]:
        """The figures of the whole job, without those of this process."""
        return {k: value for k, value in self.to_json().items() if not k.endswith("_now")}


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
    job = _Job(out, settings, exclude_truncated=exclude_truncated)
    job.check()
    source = ShardedRows(sources, limit=limit)
    with job.shared() as claims:
        with claims.alone("job"):
            if (earlier := job.finished(source.rows)) is not None:
                return earlier
            job.record()
        share = _Share(job, source, answerer, sampling.keep_reasoning, patience, watch)
        share.work(claims, say)
        with claims.alone("job"):
            job.finish(share.summary, share.ledger)
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


class Ledger:
    """The finished rows of a job, as far as this process has read the files of all processes.

    Rows that had failed before this process started are retried; those that fail while it runs are
    not.
    """

    def __init__(self, directory: Path, rows: int) -> None:
        self._directory, self._rows = directory, rows
        self._own = directory / f"{time.time_ns()}-{uuid.uuid4().hex}.jsonl"
        self._read: dict[Path, int] = {}  # bytes of the files of other processes
        self.good: set[int] = set()
        self.failed: set[int] = set()
        self.refresh()
        self.failed_before, self.failed = self.failed, set()

    def refresh(self) -> None:
        """Read what other processes have added since the last call."""
        for path in self._files():
            start = self._read.get(path, 0)
            if path == self._own or not path.exists() or start == path.stat().st_size:
                continue
            for _, end, record in journal.read(path, _LINES, start=start):
                self._read[path] = end
                if record["row"] < self._rows:
                    (self.good if record["good"] else self.failed).add(record["row"])
        self.failed -= self.good

    def add(self, row: int, value: dict[str, Any], *, good: bool) -> None:
        journal.append(self._own, row, value, good=good)
        (self.good if good else self.failed).add(row)

    def has(self, rows: range) -> bool:
        """Whether all these rows are finished."""
        return all(row in self.good or row in self.failed for row in rows)

    def __len__(self) -> int:
        return len(self.good) + len(self.failed)

    def records(self) -> Iterator[dict[str, Any]]:
        """The record that counts of each row, in order: the last good one, else the last."""
        best: dict[int, tuple[bool, Path, int]] = {}
        for path in self._files():
            for start, _, record in journal.read(path, _LINES):
                row, good = record["row"], record["good"]
                if row < self._rows and (good or not best.get(row, (False,))[0]):
                    best[row] = good, path, start
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in self._files()}
            for _, (_, path, start) in sorted(best.items()):
                files[path].seek(start)
                yield json.loads(files[path].readline())

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.jsonl"))


@dataclass
class _Share:
    """One process's share of a job: it answers the rows of the shards that it claims."""

    job: "_Job"
    source: ShardedRows
    answerer: Answerer
    keep_reasoning: bool
    patience: int
    watch: Watch

    def __post_init__(self) -> None:
        rows, together = self.source.rows, self.answerer.together
        self.summary, self.ledger = Summary(rows), Ledger(self.job.parts, rows)
        shards = self.source.shards(-(-_SHARD_ROWS // together) * together)
        # A name is made of the rows: another size gives other claims.
        self._shards = {f"{shard.start:09d}-{shard.stop:09d}": shard for shard in shards}
        self._failures_left, self._finished_before = self.patience, len(self.ledger)
        self._begin = self._refreshed_at = time.perf_counter()
        self._report_progress(len(self.ledger))

    def work(self, claims: Claims, say: Callable[[str], None]) -> None:
        """Answer rows until every shard is done, by this process or another."""
        left, reported = dict.fromkeys(self._shards), 0
        while left:
            idle = True
            free = claims.free(left, self._is_done)
            for name in free:
                # rows that are answered together: claim the next shard when this one is done
                names = [name] if self.answerer.together > 1 else itertools.chain([name], free)
                self.answerer.run(self._tasks(names), self._report)
                idle = False
            if left and idle:  # else some may be done or free again by now
                if len(left) != reported:
                    what = counted(len(left), "shard")
                    say(f"waiting for {what} that other processes are answering")
                reported = len(left)
                time.sleep(POLL_S)
                self.ledger.refresh()
                self._report_progress(len(self.ledger))
        # The last process may find the files already removed.
        self._report_progress(self.summary.rows)

    def _is_done(self, name: str) -> bool:
        """Whether a shard is done; the files show what others did, until the job is finished."""
        if not self.ledger.has(self._shards[name]):
            self.ledger.refresh()
        # checked after reading: files are removed only once the job is finished
        return self.ledger.has(self._shards[name]) or not self.job.is_begun

    def _tasks(self, names: Iterable[str]) -> Iterator[Task]:
        """Yield the rows that are not done yet; rows that cannot be asked are recorded as failed.

        If a killed process left a group unfinished that is answered together, its done rows are
        included: sampled answers are then the same as without the interruption.
        """
        ledger = self.ledger
        for name in names:
            rows = iter(self.source.read(self._shards[name]))
            while group := list(itertools.islice(rows, self.answerer.together)):
                known = (ledger.good, ledger.failed_before, ledger.failed)
                unfinished = any(not any(number in rows for rows in known) for number, _ in group)
                for number, (place, row) in group:
                    done = number in ledger.good
                    if done and not unfinished:
                        continue
                    try:
                        if isinstance(row, BadRow):
                            raise row
                        dialogue = Dialogue(row, keep_reasoning=self.keep_reasoning)
                        yield Task(number, place, row, dialogue, done)
                    except BadRow as bad:
                        self._fail(number, place, None if isinstance(row, BadRow) else row, bad)

    def _report(self, outcome: EndedTask) -> None:
        task, bad = outcome.task, outcome.bad
        if task.done:
            return
        if bad is not None:
            self._fail(task.number, task.place, task.row, bad)
            self._failures_left = self._failures_left - 1 if outcome.hopeless else self.patience
            if self._failures_left <= 0:
                raise BadInput(
                    f"{self.patience} rows one after another failed: {bad.reason} ({bad.detail})",
                    fix="see to the server and run the same command again: nothing done is lost",
                )
            return
        dialogue = task.dialogue
        self._failures_left = self.patience
        self.summary.answered_now += 1
        self.summary.tokens_now += dialogue.tokens
        facts = {"truncated": dialogue.truncated, "tokens": dialogue.tokens}
        self._add(task.number, {**facts, "value": dialogue.new_row(task.row)}, good=True)

    def _fail(self, number: int, place: str, row: Any, bad: BadRow) -> None:
        self.summary.failed_now += 1
        value = {"place": place, "reason": bad.reason, "detail": bad.detail, "original": row}
        self._add(number, value, good=False)

    def _add(self, number: int, value: dict[str, Any], *, good: bool) -> None:
        self.ledger.add(number, value, good=good)
        if time.perf_counter() - self._refreshed_at > _REFRESH_S:
            self._refreshed_at = time.perf_counter()
            self.ledger.refresh()
        self._report_progress(len(self.ledger))

    def _report_progress(self, finished: int) -> None:
        summary = self.summary
        done_here = summary.answered_now + summary.failed_now
        summary.others_now = max(0, finished - self._finished_before - done_here)
        summary.seconds_now = time.perf_counter() - self._begin
        self.watch(finished, summary)


class _Job:
    """The files of a job, and how it is started, shared and finished. The shared ones are written
    by the process that holds the claim "job"."""

    def __init__(self, out: Path, settings: dict[str, Any], *, exclude_truncated: bool) -> None:
        stem = out.name.removesuffix(".jsonl")
        self.out, self._settings, self._exclude = out, settings, exclude_truncated
        self.parts = out.with_name(f"{out.name}.parts")
        self._settings_path = self.parts / "settings.json"
        self._manifest = out.with_name(f"{stem}.manifest.json")
        self._failed = out.with_name(f"{stem}.failed.jsonl")

    @contextlib.contextmanager
    def shared(self) -> Iterator[Claims]:
        """Work on the job alongside any number of other processes. A job that was never started, or
        is finished, leaves nothing behind: the last process to leave removes the directory."""
        try:
            with Claims(self.parts / ".claims") as claims:
                try:
                    yield claims
                finally:
                    with claims.alone("job"):
                        for path in [] if self.is_begun else self.parts.glob("*.jsonl"):
                            path.unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):  # others are at work, or the job is not finished
                self.parts.rmdir()

    @property
    def is_begun(self) -> bool:
        """Whether the job was started and is not known to be complete."""
        return self._settings_path.is_file()

    def check(self) -> None:
        """Refuse files of another job before anything is written, claims included."""
        was_begun = self.is_begun
        try:
            self.finished(0)
        except BadInput:
            if self.is_begun == was_begun:  # else another process has just started or finished it
                raise

    def record(self) -> None:
        if not self.is_begun:
            write_json(self._settings_path, self._settings)

    def finished(self, rows: int) -> Summary | None:
        """The summary of a finished job, or None while there is work to do."""
        if self.is_begun:
            settings = read_json(self._settings_path, what="the record of the job", finite=False)
            self._compare(settings, self._settings_path)
            return None
        if not self._manifest.is_file():
            if self.out.exists():
                what, fix = "exists, and was not made by this command", "name another --out"
                raise BadInput(what, where=str(self.out), fix=fix)
            return None
        self._take_result(summary := Summary(rows))
        if self._exclude and summary.truncated:
            raise BadInput(
                f"finished, with {counted(summary.truncated, 'truncated answer')} in it",
                where=str(self.out),
                fix="leave out the rows whose `finish` is `length`, or name another --out",
            )
        return summary

    def finish(self, summary: Summary, ledger: Ledger) -> None:
        """Write the good rows in the order of the data, the failures with their reasons, and the
        manifest. Every process that sees failures writes the same, until there are none."""
        if self.is_begun:
            self._merge(summary, ledger)
            result = {**summary.result(), "exclude_truncated": self._exclude}
            write_json(self._manifest, {"fledge": __version__, **self._settings, "result": result})
            if not summary.failed.dropped and not summary.excluded:
                self._settings_path.unlink()  # else a later run may need the parts
        elif self._manifest.is_file():  # another process has finished the job
            self._take_result(summary)
        else:
            raise removed(self.parts)

    def _merge(self, summary: Summary, ledger: Ledger) -> None:
        failures: list[dict[str, Any]] = []
        with atomic_file(self.out) as handle:
            for record in ledger.records():
                if not record["good"]:
                    failures.append(record)
                    continue
                summary.tokens += record["tokens"]
                truncated = record.get("truncated", False)
                summary.truncated += truncated
                if truncated and self._exclude:
                    summary.excluded += 1
                else:
                    handle.write(journal.json_line(record["value"]))
                    summary.written += 1
        summary.failed = DropReport(summary.written + summary.excluded)
        for failure in failures:
            summary.failed.add(failure["place"], BadRow(failure["reason"], failure["detail"]))
        if failures:
            with atomic_file(self._failed) as handle:
                handle.writelines(map(journal.json_line, failures))
        else:
            self._failed.unlink(missing_ok=True)

    def _take_result(self, summary: Summary) -> None:
        """Take over the result that another process has written."""
        what = "the manifest"
        manifest = read_json(self._manifest, Table({"result": _RESULT}), what=what, finite=False)
        self._compare(manifest, self._manifest)
        result = manifest["result"]
        for name in _FIGURES:
            setattr(summary, name, result[name])
        kept = summary.written + summary.excluded
        summary.failed = DropReport(kept, result["reasons"], result["examples"])

    def _compare(self, record: dict[str, Any], path: Path) -> None:
        """Refuse the record of a job with other settings."""
        for section, value in json.loads(json.dumps(self._settings)).items():
            was, now = record.get(section), value
            name = section
            if isinstance(was, dict) and isinstance(now, dict):
                # The location of the data does not matter, only its contents; absent equals null.
                keys = (key for key in {**now, **was} if f"{section}.{key}" != "data.sources")
                key = next((key for key in keys if was.get(key) != now.get(key)), "")
                name, was, now = f"{section}.{key}", was.get(key), now.get(key)
            if was != now:
                raise BadInput(
                    f"begun with another {name}: {shown(was)}, not {shown(now)}",
                    where=str(path),
                    fix="name another --out, or give the old settings",
                )
