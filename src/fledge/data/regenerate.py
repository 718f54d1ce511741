"""Replace the answers of a data set by the target's own.

A draft learns to predict what the target would generate: answers by another author teach the wrong
distribution. Any number of processes share a job: each answers the shards of rows that it claims
(`core.claims`), and takes over those of processes that have died; one that finds all of them done
merges the answers. An `Answerer` generates them: a server (`chat_servers`) or a model in this
process (`decode.regenerate`).

    answers.jsonl.parts/     removed when all rows are good
        settings.json        what must not change while the job is unfinished
        000012.jsonl         the finished rows of a shard (`journal`)
    answers.jsonl            the good rows in the order of the data
    answers.failed.jsonl     the others with their reasons, if any
    answers.manifest.json    data, target, template, sampling, counts
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge import __version__
from fledge.core.claims import POLL_S, Claims
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file, check_place, removed, write_json
from fledge.core.reading import read_json, shown
from fledge.core.terminal import counted
from fledge.data import journal
from fledge.data.dialogue import Answerer, Dialogue, EndedTask, Sampling, Task
from fledge.data.drops import BadRow, DropReport
from fledge.data.sources import Part, Row, fingerprint, make_parts

_SHARD_ROWS = 64  # rounded up to a multiple of the rows that are answered together


@dataclass
class Summary:
    """The result of a job, which the manifest stores, and this process's contribution to it."""

    rows: int  # in the data
    written: int = 0
    truncated: int = 0  # answers that the length limit cut short
    tokens: int = 0  # generated, in the good rows
    failed: DropReport = field(default_factory=DropReport)
    answered_now: int = 0  # by this process
    failed_now: int = 0
    tokens_now: int = 0
    seconds_now: float = 0.0

    def to_json(self) -> dict[str, Any]:
        reasons = {"reasons": self.failed.counts, "examples": self.failed.examples}
        return {**asdict(self), "failed": self.failed.dropped, **reasons}

    def result(self) -> dict[str, Any]:
        """The figures of the whole job, without those of this process."""
        return {k: value for k, value in self.to_json().items() if not k.endswith("_now")}

    def take(self, result: dict[str, Any]) -> None:
        """Take over the result that another process has written."""
        self.written, self.truncated = result["written"], result["truncated"]
        self.tokens = result["tokens"]
        self.failed = DropReport(self.written, result["reasons"], result["examples"])


Watch = Callable[[int, Summary], None]  # arguments: finished rows, figures so far


def regenerate(
    sources: list[str],
    out: Path,
    answerer: Answerer,
    sampling: Sampling,
    *,
    limit: int | None = None,
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
    settings = {"data": data, "target": answerer.identity(), "sampling": asdict(sampling)}
    job = _Job(out, settings)
    shards = make_shards(sources, answerer.together, limit)
    summary = Summary(sum(len(shard.numbers) for shard in shards.values()))
    with job.shared() as claims:
        with claims.alone("job"):
            if job.finished(summary):
                return summary
            job.record()
        share = _Share(job, shards, summary, answerer, patience, watch)
        share.work(claims, say)
        with claims.alone("job"):
            job.finish(summary, shards)
    return summary


def check_out(out: Path, sources: list[str]) -> None:
    """Refuse an output path that cannot work, before a target is loaded."""
    check_place(out, read=sources)
    if not out.name.endswith(".jsonl"):
        raise BadInput(f"'{out.name}' is not a .jsonl file", where="--out")


@dataclass(frozen=True)
class Shard:
    """Consecutive rows, which one process answers."""

    part: Part
    numbers: range  # their places in the data, from 0

    def read(self) -> Iterator[tuple[int, Row]]:
        return zip(self.numbers, self.part.rows(), strict=False)


def make_shards(sources: list[str], together: int, limit: int | None) -> dict[str, Shard]:
    """All rows, or the first `limit`, in shards that hold whole groups of `together` rows."""
    shards: dict[str, Shard] = {}
    first = 0
    for part in make_parts(sources, together * -(-_SHARD_ROWS // together)):
        rest = None if limit is None else limit - first
        count = sum(1 for _ in itertools.islice(part.rows(), rest))
        if count:
            shards[f"{len(shards):06d}"] = Shard(part, range(first, first + count))
        first += count
    return shards


@dataclass
class _Share:
    """One process's share of a job: it answers the rows of the shards that it claims."""

    job: "_Job"
    shards: dict[str, Shard]
    summary: Summary
    answerer: Answerer
    patience: int
    watch: Watch

    def __post_init__(self) -> None:
        self._begin = time.perf_counter()
        self._failures_left = self.patience
        self._done, self._counted = 0, set[str]()  # finished rows; shards counted among them
        # Rows that failed before this process started are retried, later ones are not.
        paths = (self.job.journal(name) for name in self.shards)
        self._before = {path: path.stat().st_size for path in paths if path.exists()}

    def work(self, claims: Claims, say: Callable[[str], None]) -> None:
        """Answer rows until every shard is done, by this process or another."""
        left, reported = dict.fromkeys(self.shards), 0
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
                self._report_progress()

    def _recorded(self, name: str) -> tuple[set[int], set[int]]:
        """The rows of a shard that are finished, and those that failed before this process."""
        done, failed = set[int](), set[int]()
        path = self.job.journal(name)
        for offset, record in journal.read(path):
            new = record["good"] or offset >= self._before.get(path, 0)
            (done if new else failed).add(record["row"])
        return done, failed - done

    def _is_done(self, name: str) -> bool:
        numbers = self.shards[name].numbers
        done, _ = self._recorded(name)
        # checked after reading: files are removed only once the job is finished
        if len(done) < len(numbers) and self.job.is_begun:
            return False
        if name not in self._counted:
            self._counted.add(name)
            self._done += len(numbers)
        return True

    def _tasks(self, names: Iterable[str]) -> Iterator[Task]:
        """Yield the rows that are not done yet; rows that cannot be asked are recorded as failed.

        If a killed process left a group unfinished that is answered together, all of its rows are
        answered again: sampled answers are then the same as without the interruption.
        """
        together = self.answerer.together
        for name in names:
            shard = self.shards[name]
            done, failed = self._recorded(name)
            begun = {n // together for n in shard.numbers if n not in done and n not in failed}
            done = {n for n in done if n // together not in begun}
            self._counted.add(name)
            self._done += len(done)
            for number, (place, row) in shard.read():
                if number in done:
                    continue
                try:
                    if isinstance(row, BadRow):
                        raise row
                    yield Task(number, place, row, Dialogue(row), name)
                except BadRow as bad:
                    original = None if isinstance(row, BadRow) else row
                    self._fail(name, number, place, original, bad)

    def _report(self, outcome: EndedTask) -> None:
        task, bad = outcome.task, outcome.bad
        if bad is not None:
            self._fail(task.shard, task.number, task.place, task.row, bad)
            self._failures_left = self._failures_left - 1 if outcome.hopeless else self.patience
            if self._failures_left <= 0:
                raise BadInput(
                    f"{self.patience} rows one after another failed: {bad.reason} ({bad.detail})",
                    fix="see to the server and run the same command again: nothing done is lost",
                )
            return
        self._failures_left = self.patience
        self.summary.answered_now += 1
        self.summary.tokens_now += task.dialogue.tokens
        value = task.dialogue.new_row(task.row)
        self._add(task.shard, {"row": task.number, "good": True, "value": value})

    def _fail(self, shard: str, number: int, place: str, row: Any, bad: BadRow) -> None:
        self.summary.failed_now += 1
        why = {"place": place, "reason": bad.reason, "detail": bad.detail}
        self._add(shard, {"row": number, "good": False, **why, "original": row})

    def _add(self, shard: str, record: dict[str, Any]) -> None:
        journal.append(self.job.journal(shard), record)
        self._done += 1
        self._report_progress()

    def _report_progress(self) -> None:
        self.summary.seconds_now = time.perf_counter() - self._begin
        self.watch(self._done, self.summary)


class _Job:
    """The files of a job, and how it is started, shared and finished. The shared ones are written
    by the process that holds the claim "job"."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        stem = out.name.removesuffix(".jsonl")
        self.out, self._settings = out, settings
        self.parts = out.with_name(f"{out.name}.parts")
        self._settings_path = self.parts / "settings.json"
        self._manifest = out.with_name(f"{stem}.manifest.json")
        self._failed = out.with_name(f"{stem}.failed.jsonl")

    def journal(self, name: str) -> Path:
        """The finished rows of a shard."""
        return self.parts / f"{name}.jsonl"

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

    def record(self) -> None:
        if not self.is_begun:
            write_json(self._settings_path, self._settings)

    def finished(self, summary: Summary) -> bool:
        """Whether there is nothing left to do; `summary` then has the result."""
        if self.is_begun:
            self._compare(self._settings_path)
            return False
        if self._manifest.is_file():
            summary.take(self._compare(self._manifest)["result"])
            return True
        if self.out.exists():
            what, fix = "exists, and was not made by this command", "name another --out"
            raise BadInput(what, where=str(self.out), fix=fix)
        return False

    def finish(self, summary: Summary, shards: dict[str, Shard]) -> None:
        """Write the good rows in the order of the data, the failures with their reasons, and the
        manifest. Every process that sees failures writes the same, until there are none."""
        if not self.is_begun:  # another process has finished the job
            if not self.finished(summary):
                raise removed(self.parts)
            return
        self._merge(summary, shards)
        settings = {"fledge": __version__, **self._settings}
        write_json(self._manifest, {**settings, "result": summary.result()})
        if not summary.failed.dropped:
            self._settings_path.unlink()  # else the next run needs the parts

    def _merge(self, summary: Summary, shards: dict[str, Shard]) -> None:
        failures: list[dict[str, Any]] = []
        with atomic_file(self.out) as handle:
            for record in self._records(shards):
                if record["good"]:
                    value = record["value"]
                    summary.written += 1
                    summary.tokens += value["tokens"]
                    summary.truncated += value["finish"] == "length"
                    handle.write(journal.json_line(value))
                else:
                    failures.append(record)
        summary.failed = DropReport(summary.written)
        for failure in failures:
            summary.failed.add(failure["place"], BadRow(failure["reason"], failure["detail"]))
        if failures:
            with atomic_file(self._failed) as handle:
                handle.writelines(map(journal.json_line, failures))
        else:
            self._failed.unlink(missing_ok=True)

    def _records(self, shards: dict[str, Shard]) -> Iterator[dict[str, Any]]:
        """The record that counts of each row, in order: the last good one, else the last."""
        for name in shards:
            rows: dict[int, dict[str, Any]] = {}
            for _, record in journal.read(self.journal(name)):
                if record["good"] or not rows.get(record["row"], record)["good"]:
                    rows[record["row"]] = record
            yield from (rows[number] for number in sorted(rows))

    def _compare(self, path: Path) -> dict[str, Any]:
        """The record at `path`; that of a job with other settings is refused."""
        record: dict[str, Any] = read_json(path, what="the record of the job")
        for section, settings in json.loads(json.dumps(self._settings)).items():
            known = record.get(section, {})
            for name, now in settings.items():
                was = known.get(name)
                # The location of the data does not matter, only its contents.
                if was != now and name != "sources":
                    raise BadInput(
                        f"begun with another {section}.{name}: {shown(was)}, not {shown(now)}",
                        where=str(path),
                        fix="name another --out, or give the old settings",
                    )
        return record
