"""The files of a regeneration, from its first process to its last.

    answers.jsonl.parts/     removed when all rows are good
        settings.json        what must not change while the job is unfinished
        000000000-000000064.jsonl    the rows of a shard (`journal`), by whoever has claimed it
    answers.jsonl            the good rows in the order of the data
    answers.failed.jsonl     the others with their reasons, if any
    answers.manifest.json    data, target, template, sampling, counts

All files are written by one process at a time: a shard by the one that has claimed it
(`core.claims`), the others by the one that holds `JobFiles.alone`.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fledge import __version__
from fledge.core.claims import Claims
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file, removed, write_json
from fledge.core.reading import Expected, Table, Text, Whole, read_json, shown
from fledge.core.terminal import counted
from fledge.data import journal
from fledge.data.drops import BadRow, DropReport

# What a shard holds for a row that is good, or has failed.
_KINDS: dict[bool, Expected] = {
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
        value = asdict(self)
        report = value.pop("failed")
        reasons = {"reasons": report["counts"], "examples": report["examples"]}
        return {**value, "failed": self.failed.dropped, **reasons}

    def result(self) -> dict[str, Any]:
        """The figures of the whole job, without those of this process."""
        return {k: value for k, value in self.to_json().items() if not k.endswith("_now")}


class Shard:
    """The rows of one shard, as far as this process has read its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = range(*map(int, path.stem.split("-")))
        self.good: set[int] = set()
        self.failed: set[int] = set()  # while this process is at work, which does not retry them
        self._read = 0  # bytes
        self.refresh()
        self.failed_before, self.failed = self.failed, set()

    @staticmethod
    def name(rows: range) -> str:
        """Made of its rows: another shard size gives other claims and files."""
        return f"{rows.start:09d}-{rows.stop:09d}"

    @property
    def finished(self) -> int:
        return len(self.good) + len(self.failed)

    @property
    def is_done(self) -> bool:
        return self.finished == len(self.rows)

    def refresh(self) -> int:
        """Read what was added since the last call. Returns how many more rows are finished."""
        before = self.finished
        for position, record in journal.read(self.path, _KINDS, start=self._read):
            self._read = position
            if record["row"] in self.rows:
                (self.good if record["good"] else self.failed).add(record["row"])
        self.failed -= self.good
        return self.finished - before

    def add(self, row: int, value: dict[str, Any], *, good: bool) -> int:
        journal.append(self.path, row, value, good=good)
        return self.refresh()

    def records(self) -> list[dict[str, Any]]:
        """The record that counts of each row, in order: the latest good one, else the latest."""
        best: dict[int, dict[str, Any]] = {}
        for _, record in journal.read(self.path, _KINDS):
            row = record["row"]
            if row in self.rows and (record["good"] or not best.get(row, record)["good"]):
                best[row] = record
        return [best[row] for row in sorted(best)]


class JobFiles:
    """The files of a job, and how it is started, shared and finished."""

    def __init__(self, out: Path, settings: dict[str, Any], *, exclude_truncated: bool) -> None:
        stem = out.name.removesuffix(".jsonl")
        self.out, self._settings, self._exclude = out, settings, exclude_truncated
        self.parts = out.with_name(f"{out.name}.parts")
        self._settings_path = self.parts / "settings.json"
        self._merged = self.parts / "merged.json"  # the sizes of the shards the output is made of
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

    def shards(self) -> list[Path]:
        """The files of the shards that were begun, in the order of the data."""
        digits = 9 * "[0-9]"
        return sorted(self.parts.glob(f"{digits}-{digits}.jsonl"))

    def check(self) -> None:
        """Refuse files of another job before anything is written, claims included."""
        was_begun = self.is_begun
        try:
            self.finished(0)
        except BadInput:
            if self.is_begun == was_begun:  # else another process has just started or finished it
                raise

    def begin(self) -> None:
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

    def finish(self, shards: Iterable[Shard], summary: Summary) -> None:
        """Write the good rows in the order of the data, the failures with their reasons, and the
        manifest, unless another process has written them from the same shards."""
        if not self.is_begun:  # another process has finished the job
            if not self._manifest.is_file():
                raise removed(self.parts)
            self._take_result(summary)
            return
        sizes = {path.name: path.stat().st_size for path in self.shards()}
        merged_from = {"parts": sizes, "exclude_truncated": self._exclude}
        if self._is_merged_from(merged_from):
            self._take_result(summary)
        else:
            self._merge(shards, summary)
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

    def _merge(self, shards: Iterable[Shard], summary: Summary) -> None:
        failures: list[dict[str, Any]] = []
        with atomic_file(self.out) as handle:
            for record in (record for shard in shards for record in shard.records()):
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
        new = _flat(json.loads(json.dumps(self._settings)))
        old = _flat({name: record.get(name) for name in self._settings})
        for name in dict.fromkeys([*new, *old]):
            # The location of the data does not matter, only its contents; absent equals null.
            was, now = old.get(name), new.get(name)
            if was != now and name != "data.sources":
                raise BadInput(
                    f"begun with another {name}: {shown(was)}, not {shown(now)}",
                    where=str(path),
                    fix="name another --out, or give the old settings",
                )

    def _remove_parts(self) -> None:
        """Remove the parts, unless another process has started the job again."""
        if not self.is_begun:
            for path in (*self.parts.glob("*.jsonl"), self._merged):
                path.unlink(missing_ok=True)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """`{"data": {"limit": 3}}` as `{"data.limit": 3}`."""
    flat: dict[str, Any] = {}
    for section, value in settings.items():
        nested = isinstance(value, dict)
        flat |= {f"{section}.{k}": v for k, v in value.items()} if nested else {section: value}
    return flat


class Onlooker:
    """The progress of a job, for a process that starts workers and only watches them."""

    def __init__(self, out: Path) -> None:
        self._job = JobFiles(out, {}, exclude_truncated=False)
        self._shards: dict[Path, Shard] = {}

    def rows_over(self) -> int:
        """Number of rows that are good, or have failed at least once."""
        for path in self._job.shards():  # none once the job is finished
            if path in self._shards:
                self._shards[path].refresh()
            else:
                self._shards[path] = Shard(path)
        return sum(
            len(shard.good | shard.failed | shard.failed_before) for shard in self._shards.values()
        )

    def leave(self) -> None:
        """Remove leftovers of killed processes, unless others are at work."""
        if self._job.parts.exists():
            with self._job.shared():
                pass
