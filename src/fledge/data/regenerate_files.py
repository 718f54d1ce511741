"""The files of a regeneration, from its first process to its last.

    answers.jsonl.parts/     what is done so far (`journal`) and claimed by whom (`core.claims`);
                             removed when all rows are good
    answers.jsonl            the good rows in the order of the data
    answers.failed.jsonl     the others with their reasons, if any
    answers.manifest.json    data, target, template, sampling, counts

All files except the journal's parts are read and written by one process at a time.
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
from fledge.core.files import atomic_file, removed, write_json
from fledge.core.reading import Table, Text, Whole, read_json, shown
from fledge.core.terminal import counted
from fledge.data.drops import BadRow, DropReport
from fledge.data.journal import Journal, json_line

# What the journal holds for a row, and the manifest for a finished job.
_GOOD = Table({"tokens": Whole(), "value": Table()})
_FAILED = Table({"place": Text(), "reason": Text(), "detail": Text()})
_FIGURES = ("written", "truncated", "tokens")
_RESULT = Table(
    {name: Whole() for name in _FIGURES},
    optional={"excluded": Whole(), "reasons": Table(), "examples": Table()},
)


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
        value = asdict(self)
        report = value.pop("failed")
        reasons = {"reasons": report["counts"], "examples": report["examples"]}
        return {**value, "failed": self.failed.dropped, **reasons}

    def result(self) -> dict[str, Any]:
        """The figures of the whole job, without those of this process."""
        return {k: value for k, value in self.to_json().items() if not k.endswith("_now")}

    def take(self, result: dict[str, Any]) -> None:
        """Take over the result that another process, or an earlier version, has written."""
        self.written, self.truncated, self.tokens = (result[name] for name in _FIGURES)
        self.excluded = result.get("excluded", 0)
        counts, examples = result.get("reasons", {}), result.get("examples", {})
        self.failed = DropReport(self.written + self.excluded, counts, examples)


class JobFiles:
    """The files of a job, and how it is started, shared and finished."""

    def __init__(self, out: Path, settings: dict[str, Any], *, exclude_truncated: bool) -> None:
        stem = out.name.removesuffix(".jsonl")
        self.out, self._settings, self._exclude = out, settings, exclude_truncated
        self.parts = out.with_name(f"{out.name}.parts")
        self._settings_path = self.parts / "settings.json"
        self._merged = self.parts / "merged.json"  # which parts the output was merged from
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
                    if not self.is_begun:
                        with self.alone(claims):
                            self._remove_parts()
        finally:
            with contextlib.suppress(OSError):  # others are at work, or the job is not finished
                self.parts.rmdir()

    @staticmethod
    def alone(claims: Claims) -> contextlib.AbstractContextManager[None]:
        """The lock to hold while shared files are written."""
        return claims.alone("job")

    @property
    def is_begun(self) -> bool:
        """Whether the job was started and is not known to be complete."""
        return self._settings_path.is_file()

    def journal(self) -> Journal:
        return Journal(self.parts, good=_GOOD, failed=_FAILED)

    def finished(self, rows: int) -> Summary | None:
        """The summary of a finished job, or None while there is work to do."""
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
        """Refuse files of another job before anything is written, claims included."""
        was_begun = self.is_begun
        try:
            self._compare_settings() if was_begun else self.finished(0)
        except BadInput:
            if self.is_begun == was_begun:  # else another process has just started or finished it
                raise

    def begin(self) -> None:
        """Write the job's settings, or compare them with those it was started with."""
        if self.is_begun:
            self._compare_settings()
        else:
            write_json(self._settings_path, self._settings)

    def finish(self, journal: Journal, summary: Summary) -> None:
        """Write the good rows in the order of the data, the failures with their reasons, and the
        manifest, unless another process has written them from the same parts."""
        if not self.is_begun:  # another process has finished the job
            if not self._manifest.is_file():
                raise removed(self.parts)
            self._take_result(summary)
            return
        journal.read_new()
        merged_from = {"parts": journal.sizes, "exclude_truncated": self._exclude}
        if self._is_merged_from(merged_from):
            self._take_result(summary)
        else:
            self._write_rows(journal, summary)
            self._write_failures(journal, summary)
            result = {**summary.result(), "exclude_truncated": self._exclude}
            write_json(self._manifest, {"fledge": __version__, **self._settings, "result": result})
            write_json(self._merged, merged_from)
        if not summary.failed.dropped and not summary.excluded:
            self._settings_path.unlink()  # else a later run may need the parts

    def _is_merged_from(self, parts: dict[str, Any]) -> bool:
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
                if row >= summary.rows:  # beyond the data
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
        manifest = read_json(self._manifest, Table({"result": _RESULT}), what=what, finite=False)
        self._compare(manifest, self._manifest)
        summary.take(manifest["result"])

    def _compare_settings(self) -> None:
        settings = read_json(self._settings_path, what="the record of the job", finite=False)
        self._compare(settings, self._settings_path)

    def _compare(self, record: dict[str, Any], path: Path) -> None:
        for section, current in self._settings.items():
            recorded = record.get(section)
            if recorded == json.loads(json.dumps(current)):
                continue
            pairs = [(section, current, recorded)]
            if isinstance(current, dict) and isinstance(recorded, dict):
                names = sorted({*current, *recorded})
                pairs = [(f"{section}.{n}", current.get(n), recorded.get(n)) for n in names]
            differing = [(n, a, b) for n, a, b in pairs if a != b]
            # The location of the data does not matter, only its contents; absent equals null.
            if not differing or (name := differing[0][0]) == "data.sources":
                continue
            _, new, old = differing[0]
            raise BadInput(
                f"begun with another {name}: {shown(old)}, not {shown(new)}",
                where=str(path),
                fix="name another --out, or give the old settings",
            )

    def _remove_parts(self) -> None:
        """Remove the parts, unless another process has started the job again."""
        if self.is_begun:
            return
        leftovers = [*self.parts.glob("part-*.jsonl"), self._merged, self.parts / ".lock"]
        for path in leftovers:  # the lock is from earlier versions
            path.unlink(missing_ok=True)


class Onlooker:
    """The progress of a job, for a process that starts workers and only watches them."""

    def __init__(self, out: Path) -> None:
        self._job = JobFiles(out, {}, exclude_truncated=False)
        self._journal: Journal | None = None

    def rows_over(self) -> int:
        """Number of rows that are good, or have failed at least once."""
        with contextlib.suppress(BadInput):  # the job is finished, and its parts are removed
            if self._journal is not None:
                self._journal.read_new()
            elif self._job.is_begun:
                self._journal = self._job.journal()
        return 0 if self._journal is None else len(self._journal.entries)

    def leave(self) -> None:
        """Remove leftovers of killed processes, unless others are at work."""
        if self._job.parts.exists():
            with self._job.shared():
                pass
