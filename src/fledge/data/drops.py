"""What was dropped, why, and where: a bad row never stops a job and is always reported."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fledge.core.errors import BadInput

EXAMPLES_PER_REASON = 3


class BadRow(Exception):  # noqa: N818  (caught row by row, never shown as a traceback)
    """A row that cannot be used; `reason` is the short phrase it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason)


@dataclass
class DropReport:
    """Counts by reason, and the first examples of each with their place in the data."""

    kept: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        return sum(self.counts.values())

    @property
    def share(self) -> float:
        """Share of the rows that were read and dropped."""
        return self.dropped / max(1, self.kept + self.dropped)

    def add(self, where: str, bad: BadRow) -> None:
        self._count(bad.reason, 1, [f"{where}: {bad.detail}" if bad.detail else where])

    def _count(self, reason: str, count: int, examples: list[str]) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count
        shown = self.examples.setdefault(reason, [])
        shown += examples[: EXAMPLES_PER_REASON - len(shown)]

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "counts": self.counts, "examples": self.examples}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DropReport":
        return cls(value["kept"], dict(value["counts"]), dict(value["examples"]))

    @classmethod
    def merged(cls, parts: Iterable["DropReport"]) -> "DropReport":
        total = cls()
        for part in parts:
            total.kept += part.kept
            for reason, count in part.counts.items():
                total._count(reason, count, part.examples.get(reason, []))
        return total

    def check(self, max_share: float) -> None:
        """Refuse data of which too much had to be dropped."""
        if self.kept == 0:
            raise BadInput(
                f"no usable row: {self._summary()}", fix="look at them with `data preview`"
            )
        if self.share > max_share:
            raise BadInput(
                f"{self.dropped} of {self.dropped + self.kept} rows ({self.share:.1%}) are "
                f"unusable, more than the allowed {max_share:.1%}: {self._summary()}",
                fix="mend the data, or raise max_drop_share",
            )

    def _summary(self) -> str:
        parts = [
            f"{count} x {reason} (first: {self.examples[reason][0]})"
            for reason, count in sorted(self.counts.items(), key=lambda item: -item[1])[:3]
        ]
        return ", ".join(parts) or "the data is empty"
