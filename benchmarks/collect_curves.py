"""Collects compact curves of real runs, and measures the errors of early forecasts of them.

    python benchmarks/collect_curves.py RUN ... --out tests/train/curves     keep their curves
    python benchmarks/collect_curves.py tuned.json ... --out tests/train/curves   runs of tune.py
    python benchmarks/collect_curves.py tests/train/curves/*.json            check all of them

A curve is a kilobyte: held-out length over steps, the schedule, and what was trained. The check
cuts each curve at several shares of its run, forecasts its end, and prints two tables: from its own
curve, and from the other given runs of the same recipe if there are any.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.methods.registry import METHODS
from fledge.recipe.schema import RESOLVED_NAME, load_recipe
from fledge.training.curves import Course, Curve, Kind, Known, read_curve
from fledge.training.forecast import Estimate, forecast

SHARES = (0.2, 0.4, 0.6, 0.8)
TABLES = {"own curve alone": False, "runs of the same recipe known": True}


@dataclass(frozen=True)
class Kept:
    """A curve and the kind of its run."""

    curve: Curve
    kind: Kind

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Kept":
        return cls(curve_from(value), Kind(**value["about"]))

    def to_json(self) -> dict[str, object]:
        return {"about": asdict(self.kind), **compact(self.curve)}

    @property
    def length(self) -> float:
        """The length at the end of the run."""
        return self.curve.measured[-1][1]

    def known(self, others: dict[str, "Kept"]) -> list[Known]:
        """The other runs of the same recipe."""
        return [
            Known(name, run.curve)
            for name, run in others.items()
            if run is not self and run.kind == self.kind
        ]


def compact(curve: Curve) -> dict[str, object]:
    course = {k: v for k, v in asdict(curve.course).items() if v != math.inf}
    measured = [[step, round(length, 5), n] for step, length, n in curve.measured]
    return {**asdict(curve), "course": course, "measured": measured}


def curve_from(value: dict[str, Any]) -> Curve:
    """Unknown keys are ignored: older versions wrote more."""
    rest = {k: v for k, v in value.items() if k in Curve.__dataclass_fields__}
    course = {k: v for k, v in value["course"].items() if k in Course.__dataclass_fields__}
    measured = tuple((a, b, c) for a, b, c in value["measured"])
    return Curve(**rest | {"course": Course(**course), "measured": measured})


def upto(curve: Curve, share: float) -> Curve:
    """The curve as it was when this share of the run was done."""
    step = int(share * curve.course.steps)
    return replace(
        curve,
        measured=tuple(m for m in curve.measured if m[0] <= step),
        seconds=curve.seconds * min(1.0, step / max(1, curve.step)),
        step=min(step, curve.step),
    )


def named(*parts: Path | str) -> str:
    """A file name made from a run's path or from words."""
    words = [
        part if isinstance(part, str) else "-".join(part.absolute().parts[-2:]) for part in parts
    ]
    return re.sub(r"[^A-Za-z0-9]+", "_", "-".join(words))


def tuned(path: Path, held: dict[str, Any]) -> dict[str, Kept]:
    """The runs of `tune.py` that were measured at several points. Variants of the same name are
    assumed to have the same settings, whatever file they are in."""
    recipe = load_recipe(held["setting"]["recipe"])
    target = Kind.of(recipe).target
    curves = {}
    for run in (run for run in held["runs"] if "course" in run):
        method = run.get("method") or next(filter(run["name"].startswith, METHODS), None)
        kind = Kind(method or recipe.objective.kind, target, run["name"])
        name = named(path.stem, run["name"], str(run["seed"]))
        curves[name] = Kept(curve_from(run["course"]), kind)
    return curves


def end_of(one: Kept, share: float, others: dict[str, Kept]) -> Estimate | None:
    """The forecast from the first `share` of a run; None if it is too early."""
    known = one.known(others)
    try:
        return forecast(upto(one.curve, share), known=known).end
    except BadInput:
        return None


def table(runs: dict[str, Kept], *, known: bool) -> None:
    errors: dict[float, list[float]] = {share: [] for share in SHARES}
    inside: dict[float, list[bool]] = {share: [] for share in SHARES}
    print("| run | steps | length at the end | " + " | ".join(f"{s:.0%}" for s in SHARES) + " |")
    print("|---|--:|--:|" + "--:|" * len(SHARES))
    for name, run in sorted(runs.items()):
        final, cells = run.length, []
        for share in SHARES:
            end = end_of(run, share, runs if known else {})
            if end is None:
                cells.append("too early")
                continue
            error = 100 * (end.length / final - 1)
            errors[share].append(abs(error))
            inside[share].append(end.low <= final <= end.high)
            cells.append(f"{end.length:.2f} ({error:+.1f} %)")
        print(f"| {name} | {run.curve.course.steps:,} | {final:.3f} | {' | '.join(cells)} |")
    for name, cells in summary(errors, inside).items():
        print(f"| {name} | | | {' | '.join(cells)} |")


def summary(
    errors: dict[float, list[float]], inside: dict[float, list[bool]]
) -> dict[str, Sequence[str]]:
    return {
        "runs": [f"{len(errors[s])}" for s in SHARES],
        "median error": [f"**{statistics.median(errors[s] or [0]):.1f} %**" for s in SHARES],
        "largest error": [f"{max(errors[s], default=0):.1f} %" for s in SHARES],
        "inside the interval": [f"{sum(inside[s])} of {len(inside[s])}" for s in SHARES],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="+", type=Path, help="runs, or curves (.json)")
    parser.add_argument("--out", type=Path, help="where to keep the curves of runs")
    args = parser.parse_args()
    runs: dict[str, Kept] = {}
    for place in args.places:
        content = json.loads(place.read_text()) if place.is_file() else None
        if content is None:
            kind = Kind.of(load_recipe(place / RESOLVED_NAME))
            curves = {named(place): Kept(read_curve(place), kind)}
        elif "runs" in content:
            curves = tuned(place, content)
        else:
            runs[place.stem] = Kept.from_json(content)
            continue
        runs |= curves
        for name, run in curves.items() if args.out else ():
            path = args.out / f"{name}.json"
            path.write_text(json.dumps(run.to_json()) + "\n")
            print(path)
    for title, known in TABLES.items():
        print(f"\n{title}\n")
        table(runs, known=known)


if __name__ == "__main__":
    main()
