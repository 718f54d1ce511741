"""What was dropped, why, and where: a bad row never stops a job and is always reported.

What was left out of rows that were kept is reported, too: their notes."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.text import counted

EXAMPLES_PER_REASON = 3


class BadRow(Exception):  # noqa: N818  (caught row by row, never shown as a traceback)
    """A row that cannot be used; `reason` is the short phrase it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason)


@dataclass
class DropReport:
    """Counts by reason, and for each reason the places of the first examples."""

    kept: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)  # counts of notes on kept rows
    noted: dict[str, list[str]] = field(default_factory=dict)  # places of the first examples

    @property
    def dropped(self) -> int:
        return sum(self.counts.values())

    @property
    def share(self) -> float:
        """Share of all rows that were dropped."""
        return self.dropped / max(1, self.kept + self.dropped)

    def add(self, where: str, bad: BadRow) -> None:
        where = f"{where}: {bad.detail}" if bad.detail else where
        _count(self.counts, self.examples, bad.reason, 1, [where])

    def keep(self, where: str, notes: Iterable[str] = ()) -> None:
        self.kept += 1
        for note in notes:
            _count(self.notes, self.noted, note, 1, [where])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DropReport":
        tables = (value.get(name, {}) for name in ("counts", "examples", "notes", "noted"))
        return cls(value["kept"], *map(dict, tables))

    @classmethod
    def merged(cls, parts: Iterable["DropReport"]) -> "DropReport":
        total = cls()
        for part in parts:
            total.kept += part.kept
            for reason, count in part.counts.items():
                _count(total.counts, total.examples, reason, count, part.examples.get(reason, []))
            for note, count in part.notes.items():
                _count(total.notes, total.noted, note, count, part.noted.get(note, []))
        return total

    def check(self, max_share: float) -> None:
        """Refuse data if too many rows had to be dropped."""
        if self.kept == 0:
            raise BadInput(
                f"no usable row: {self._summary()}", fix="look at them with `data preview`"
            )
        if self.share > max_share:
            raise BadInput(
                f"of {counted(self.dropped + self.kept, 'row')} {self.dropped:,} "
                f"({self.share:.1%}) cannot be used, more than the allowed {max_share:.1%}: "
                f"{self._summary()}",
                fix="fix the data, or raise max_drop_share",
            )

    def _summary(self) -> str:
        parts = [
            f"{count} x {reason} (first: {self.examples[reason][0]})"
            for reason, count in sorted(self.counts.items(), key=lambda item: -item[1])[:3]
        ]
        return ", ".join(parts) or "the data is empty"


def _count(
    counts: dict[str, int], examples: dict[str, list[str]], key: str, more: int, places: list[str]
) -> None:
    counts[key] = counts.get(key, 0) + more
    kept = examples.setdefault(key, [])
    kept += places[: EXAMPLES_PER_REASON - len(kept)]
