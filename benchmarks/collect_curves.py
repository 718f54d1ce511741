"""Compact curves of real runs, and how far off forecasts from their beginnings are.

    python benchmarks/collect_curves.py RUN ... --out tests/train/curves     keep their curves
    python benchmarks/collect_curves.py tuned.json ... --out tests/train/curves   those of tune.py
    python benchmarks/collect_curves.py tests/train/curves/*.json            check all of them

A curve is a few kilobytes: length over steps, in training and held out, and the schedule. The check
cuts each one at shares of its run, forecasts its end, and prints a table; `--steps` is for a run
whose files do not say how many it had.
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.train.curves import Curve, read_curve
from fledge.train.forecast import forecast

SHARES = (0.2, 0.4, 0.6, 0.8)
MOST_WINDOWS = 240  # kept of a curve: averages of neighbors


def compact(curve: Curve) -> dict[str, object]:
    value = curve.to_json()
    size = -(-len(curve.windows) // MOST_WINDOWS)
    groups = [curve.windows[at : at + size] for at in range(0, len(curve.windows), size)]
    value["windows"] = [
        [
            round(statistics.mean(w[0] for w in group), 1),
            round(statistics.mean(w[1] for w in group), 4),
        ]
        for group in groups
    ]
    value["measured"] = [[step, round(length, 5), n] for step, length, n in curve.measured]
    return value


def named(*parts: Path | str) -> str:
    """A file's name from a run's place, or from words."""
    words = [
        part if isinstance(part, str) else "-".join(part.absolute().parts[-2:]) for part in parts
    ]
    return re.sub(r"[^A-Za-z0-9]+", "_", "-".join(words))


def tuned(path: Path, runs: list[dict[str, Any]]) -> dict[str, Curve]:
    """Those runs of `tune.py` that were measured at several points."""
    return {
        named(path.stem, run["name"], str(run["seed"])): Curve.from_json(run["course"])
        for run in runs
        if "course" in run
    }


def check(curves: dict[str, Curve]) -> None:
    errors: dict[float, list[float]] = {share: [] for share in SHARES}
    inside: dict[float, list[bool]] = {share: [] for share in SHARES}
    print("| run | steps | length at the end | " + " | ".join(f"{s:.0%}" for s in SHARES) + " |")
    print("|---|--:|--:|" + "--:|" * len(SHARES))
    for name, curve in sorted(curves.items()):
        truth, cells = curve.measured[-1][1], []
        for share in SHARES:
            try:
                end = forecast(curve.upto(share)).end
            except BadInput:
                cells.append("too early")
                continue
            error = 100 * (end.length / truth - 1)
            errors[share].append(abs(error))
            inside[share].append(end.low <= truth <= end.high)
            cells.append(f"{end.length:.2f} ({error:+.1f} %)")
        print(f"| {name} | {curve.course.steps:,} | {truth:.3f} | {' | '.join(cells)} |")
    rows = {
        "runs": [f"{len(errors[s])}" for s in SHARES],
        "median error": [f"**{statistics.median(errors[s] or [0]):.1f} %**" for s in SHARES],
        "largest error": [f"{max(errors[s], default=0):.1f} %" for s in SHARES],
        "inside the interval": [f"{sum(inside[s])} of {len(inside[s])}" for s in SHARES],
    }
    for name, cells in rows.items():
        print(f"| {name} | | | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="+", type=Path, help="runs, or curves (.json)")
    parser.add_argument("--out", type=Path, help="where to keep the curves of runs")
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_args()
    curves: dict[str, Curve] = {}
    for place in args.places:
        held = json.loads(place.read_text()) if place.is_file() else None
        if held is None:
            found = {named(place): read_curve(place, steps=args.steps)}
        elif "runs" in held:
            found = tuned(place, held["runs"])
        else:
            curves[place.stem] = Curve.from_json(held)
            continue
        curves |= found
        for name, curve in found.items() if args.out else ():
            path = args.out / f"{name}.json"
            path.write_text(json.dumps(compact(curve)) + "\n")
            print(path)
    check(curves)


if __name__ == "__main__":
    main()
