"""What was dropped, why, and where: a bad row never stops a job and is always reported."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.terminal import counted

EXAMPLES_PER_REASON = 3

# What the length limit does to rows. A user chose it, so these rows say nothing about the data.
TOO_LONG = "longer than max_length"
CUT_UNSUPERVISED = "cut before any supervised token"
_LIMITED = (TOO_LONG, CUT_UNSUPERVISED)


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

    @property
    def dropped(self) -> int:
        return sum(self.counts.values())

    @property
    def total(self) -> int:
        return self.kept + self.dropped

    @property
    def share(self) -> float:
        """Share of all rows that were dropped."""
        return self.dropped / max(1, self.total)

    def line(self, *, most: int | None = 3) -> str:
        """What a command says about dropped rows; empty if there are none."""
        if not self.counts:
            return ""
        what = f"{self.dropped:,} of {counted(self.total, 'row')} dropped"
        return f"{what}: {_summary(self.counts, self.examples, most)}"

    def add(self, where: str, bad: BadRow) -> None:
        where = f"{where}: {bad.detail}" if bad.detail else where
        self._count(bad.reason, 1, [where])

    def _count(self, reason: str, more: int, places: list[str]) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + more
        known = self.examples.setdefault(reason, [])
        known += places[: EXAMPLES_PER_REASON - len(known)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def merged(cls, parts: Iterable[dict[str, Any]]) -> "DropReport":
        """The sum of some reports, given as `to_json` returns them."""
        total = cls()
        for part in parts:
            total.kept += part["kept"]
            for reason, count in part["counts"].items():
                total._count(reason, count, part["examples"][reason])
        return total

    def check(self, max_share: float) -> None:
        """Refuse data if no row is left, or if too many cannot be used at any length."""
        if self.kept == 0:
            summary = _summary(self.counts, self.examples) or "the data is empty"
            raise BadInput(f"no usable row: {summary}", fix="look at them with `data preview`")
        bad = {reason: count for reason, count in self.counts.items() if reason not in _LIMITED}
        unusable = sum(bad.values())
        if unusable > max_share * self.total:
            raise BadInput(
                f"of {counted(self.total, 'row')} {unusable:,} ({unusable / self.total:.1%}) "
                f"cannot be used, more than the allowed {max_share:.1%}: "
                f"{_summary(bad, self.examples)}",
                fix="fix the data, or raise --max-drop-share (data.max_drop_share in a recipe)",
            )


def _summary(counts: dict[str, int], examples: dict[str, list[str]], most: int | None = 3) -> str:
    """The most frequent reasons, each with the place of its first row."""
    frequent = sorted(counts.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{n:,} x {reason} (first: {examples[reason][0]})" for reason, n in frequent)
