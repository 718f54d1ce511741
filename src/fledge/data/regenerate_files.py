"""The files of a regeneration, from its first process to its last.

    answers.jsonl.parts/     what is done so far (`journal`), and who is at what (`core.claims`);
                             gone when all rows are good
    answers.jsonl            the good rows in the data's order
    answers.failed.jsonl     the others with their reasons, if any
    answers.manifest.json    data, target, template, sampling, counts

What is read and written as a whole (all but the journal's parts) is so by one process at a time.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge import __version__
from fledge.core.claims import Claims
from fledge.core.errors import BadInput
from fledge.core.expected import Table, Text, Whole, shown
from fledge.core.files import atomic_file, removed, write_json
from fledge.core.reading import read_json
from fledge.core.text import counted
from fledge.data.drops import BadRow, DropReport
from fledge.data.journal import Journal, json_line

# What the journal says of a row, and the manifest of a job that is over.
_GOOD = Table({"tokens": Whole(), "value": Table()})
_FAILED = Table({"place": Text(), "reason": Text(), "detail": Text()})
_FIGURES = ("written", "truncated", "tokens")
_RESULT = Table(
    {name: Whole() for name in _FIGURES},
    optional={"excluded": Whole(), "reasons": Table(), "examples": Table()},
)


@dataclass
class Summary:
    """What a job came to, which the manifest keeps, and what this process did for it."""

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
    others_now: int = 0  # rows that other processes have seen to meanwhile

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        report = value.pop("failed")
        reasons = {"reasons": report["counts"], "examples": report["examples"]}
        return {**value, "failed": self.failed.dropped, **reasons}

    def result(self) -> dict[str, Any]:
        """What is true of the job, whoever did it."""
        return {k: value for k, value in self.to_json().items() if not k.endswith("_now")}

    def take(self, result: dict[str, Any]) -> None:
        """What another process, or version, found."""
        self.written, self.truncated, self.tokens = (result[name] for name in _FIGURES)
        self.excluded = result.get("excluded", 0)
        counts, examples = result.get("reasons", {}), result.get("examples", {})
        self.failed = DropReport(self.written + self.excluded, counts, examples)


class JobFiles:
    """Where everything of a job lies, and how it is begun, shared and ended."""

    def __init__(self, out: Path, settings: dict[str, Any], *, exclude_truncated: bool) -> None:
        stem = out.name.removesuffix(".jsonl")
        self.out, self._settings, self._exclude = out, settings, exclude_truncated
        self.parts = out.with_name(f"{out.name}.parts")
        self._begun = self.parts / "settings.json"
        self._merged = self.parts / "merged.json"  # which parts the output was made of
        self._manifest = out.with_name(f"{stem}.manifest.json")
        self._failed = out.with_name(f"{stem}.failed.jsonl")

    @contextlib.contextmanager
    def shared(self) -> Iterator[Claims]:
        """At work beside any number of others. Nothing stays behind of a job that never began, or
        is over: whoever leaves last removes the directory."""
        try:
            with Claims(self.parts / ".claims") as claims:
                try:
                    yield claims
                finally:
                    if not self.is_begun:
                        with self.alone(claims):
                            self._remove_parts()
        finally:
            with contextlib.suppress(OSError):  # not the last one, or not over
                self.parts.rmdir()

    @staticmethod
    def alone(claims: Claims) -> contextlib.AbstractContextManager[None]:
        """While files are written that belong to all."""
        return claims.alone("job")

    @property
    def is_begun(self) -> bool:
        """Whether there is something to do, or was when somebody looked last."""
        return self._begun.is_file()

    def journal(self) -> Journal:
        return Journal(self.parts, good=_GOOD, failed=_FAILED)

    def finished(self, rows: int) -> Summary | None:
        """The summary of a job that is over; None while there is something to do."""
        if self.is_begun:
            return None
        if not self._manifest.is_file():
            if self.out.exists():
                raise BadInput(
                    "exists, and was not made by this command",
                    where=str(self.out),
                    fix="name another --out",
                )
            return None
        summary = Summary(rows)
        self._take_result(summary)
        if self._exclude and summary.truncated:
            raise BadInput(
                f"finished, with {counted(summary.truncated, 'truncated answer')} in it",
                where=str(self.out),
                fix="leave out the rows whose `finish` is `length`, or name another --out",
            )
        return summary

    def check(self) -> None:
        """Refuse what is another job's before anything is touched, claims included."""
        begun = self.is_begun
        try:
            self._compare_begun() if begun else self.finished(0)
        except BadInput:
            if self.is_begun == begun:  # else others are just beginning, or have ended it
                raise

    def begin(self) -> None:
        """Write down what this job is, or compare with what it was."""
        if self.is_begun:
            self._compare_begun()
        else:
            write_json(self._begun, self._settings)

    def finish(self, journal: Journal, summary: Summary) -> None:
        """The good rows in the data's order, the others with their reasons, the manifest; unless
        another process has made them of the same parts."""
        if not self.is_begun:  # the last row was good, and another process saw it first
            if not self._manifest.is_file():
                raise removed(self.parts)
            self._take_result(summary)
            return
        journal.read_new()
        made_of = {"parts": journal.sizes, "exclude_truncated": self._exclude}
        if self._is_made_of(made_of):
            self._take_result(summary)
        else:
            self._write_rows(journal, summary)
            self._write_failures(journal, summary)
            result = {**summary.result(), "exclude_truncated": self._exclude}
            write_json(self._manifest, {"fledge": __version__, **self._settings, "result": result})
            write_json(self._merged, made_of)
        if not summary.failed.dropped and not summary.excluded:
            self._begun.unlink()  # else a later run may still want the parts

    def _is_made_of(self, parts: dict[str, Any]) -> bool:
        if not (self.out.is_file() and self._manifest.is_file() and self._merged.is_file()):
            return False
        try:
            return bool(read_json(self._merged) == parts)
        except BadInput:
            return False

    def _write_rows(self, journal: Journal, summary: Summary) -> None:
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

    def _write_failures(self, journal: Journal, summary: Summary) -> None:
        failures = [entry.read() for _, entry in journal.failed()]
        summary.failed = DropReport(summary.written + summary.excluded)
        for failure in failures:
            summary.failed.add(failure["place"], BadRow(failure["reason"], failure["detail"]))
        if failures:
            with atomic_file(self._failed) as handle:
                for failure in failures:
                    handle.write(json_line(failure))
        else:
            self._failed.unlink(missing_ok=True)

    def _take_result(self, summary: Summary) -> None:
        what = "the manifest"
        held = read_json(self._manifest, Table({"result": _RESULT}), what=what, finite=False)
        self._compare(held, self._manifest)
        summary.take(held["result"])

    def _compare_begun(self) -> None:
        held = read_json(self._begun, what="the record of the job", finite=False)
        self._compare(held, self._begun)

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

    def _remove_parts(self) -> None:
        """Unless somebody has begun anew."""
        if self.is_begun:
            return
        left = [*self.parts.glob("part-*.jsonl"), self._merged, self.parts / ".lock"]
        for path in left:  # the lock is one of earlier versions
            path.unlink(missing_ok=True)


class Onlooker:
    """How far a job is, for somebody who starts others and only watches."""

    def __init__(self, out: Path) -> None:
        self._job = JobFiles(out, {}, exclude_truncated=False)
        self._journal: Journal | None = None

    def rows_over(self) -> int:
        """Rows that are good, or have failed at least once."""
        with contextlib.suppress(BadInput):  # over, and its parts are gone
            if self._journal is not None:
                self._journal.read_new()
            elif self._job.is_begun:
                self._journal = self._job.journal()
        return 0 if self._journal is None else len(self._journal.entries)

    def leave(self) -> None:
        """Remove what killed processes left, unless others are at work."""
        if self._job.parts.exists():
            with self._job.shared():
                pass
