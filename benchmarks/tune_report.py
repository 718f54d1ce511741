"""What came of the runs of `tune.py`: a table, and a plot.

    python benchmarks/tune_report.py build/tune.json [more.json ...] [plot.svg]

Every dot of the plot is a run, every bar the mean of a variant's: on held-out rows to the left, on
kinds of prompts that were not trained on to the right. Needs nothing but Python.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

UNSEEN = "kinds not trained on"
COLOURS = {"mean": "#1f6f8b", "run": "#e07a3f", "line": "#dddddd", "text": "#444444"}
NAMES, PANEL, GAP, ROW, TOP = 210, 270, 60, 22, 34  # pixels


def by_variant(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """In the order of the file; the first is what others are compared with."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return found


def lengths(runs: Sequence[dict[str, Any]], column: str, unseen: Sequence[str]) -> list[float]:
    """Of each run; that of all unseen kinds together is their mean."""
    if column != UNSEEN:
        return [run["lengths"][column] for run in runs]
    return [statistics.mean(run["lengths"][one] for one in unseen) for run in runs]


def table(runs: Sequence[dict[str, Any]], unseen: Sequence[str]) -> str:
    """Mean and spread (half of the range over the seeds) by variant and set, and the gain over the
    first variant where it counts most: on unseen kinds, if there are any."""
    if not runs:
        return "no run has ended"
    variants = by_variant(sorted(runs, key=lambda run: run["seed"]))
    columns = [*runs[0]["lengths"], *([UNSEEN] if unseen else [])]
    judged = columns[-1] if unseen else columns[0]
    first = statistics.mean(lengths(next(iter(variants.values())), judged, unseen))
    head = ["variant", "seeds", "steps", "s", *columns, f"gain, {judged}"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for name, own in variants.items():
        cells = [name, str(len(own)), f"{own[0]['steps']:,}"]
        cells.append(f"{statistics.mean(run['seconds'] for run in own):.0f}")
        for column in columns:
            found = lengths(own, column, unseen)
            spread = f" ± {(max(found) - min(found)) / 2:.3f}" if len(found) > 1 else ""
            cells.append(f"{statistics.mean(found):.3f}{spread}")
        gain = statistics.mean(lengths(own, judged, unseen)) / first - 1
        lines.append("| " + " | ".join([*cells, f"{100 * gain:+.1f} %"]) + " |")
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], unseen: Sequence[str]) -> str:
    """An SVG."""
    variants = by_variant(sorted(runs, key=lambda run: run["seed"]))
    columns = [next(iter(runs[0]["lengths"])), *([UNSEEN] if unseen else [])]
    width, height = NAMES + len(columns) * (PANEL + GAP), TOP + ROW * len(variants) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for index, name in enumerate(variants):
        parts.append(_text(NAMES - 10, TOP + ROW * index + 15, name, anchor="end"))
    for index, column in enumerate(columns):
        left = NAMES + index * (PANEL + GAP)
        parts.append(_text(left, 16, f"tokens a round, {column}"))
        parts += _panel([lengths(own, column, unseen) for own in variants.values()], left)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(found: Sequence[Sequence[float]], left: float) -> list[str]:
    low = min(map(min, found))
    span = max(map(max, found)) - low or 1.0

    def at(length: float) -> float:
        return left + 6 + (PANEL - 12) * (length - low) / span

    parts = []
    for index, own in enumerate(found):
        y, mean = TOP + ROW * index + 11, statistics.mean(own)
        parts.append(
            f'<path d="M{left} {y}h{PANEL}" stroke="{COLOURS["line"]}"/>'
            f'<path d="M{at(mean):.1f} {y - 7}v14" stroke="{COLOURS["mean"]}" stroke-width="3"/>'
        )
        for length in own:
            parts.append(f'<circle cx="{at(length):.1f}" cy="{y}" r="3" fill="{COLOURS["run"]}"/>')
        parts.append(_text(left + PANEL + 6, y + 4, f"{mean:.3f}"))
    bottom = TOP + ROW * len(found) + 14
    return [*parts, _text(left, bottom, f"{low:.3f}"),
            _text(left + PANEL, bottom, f"{low + span:.3f}", anchor="end")]  # fmt: skip


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{COLOURS["text"]}"'
    return f"<text {place}>{escape(text)}</text>"


def main(*names: str) -> None:
    """Files of one setting make one table; a name that ends with .svg is where to draw it."""
    held = [json.loads(Path(name).read_text()) for name in names if not name.endswith(".svg")]
    if any(one["setting"] != held[0]["setting"] for one in held):
        sys.exit("these files have different settings: their lengths cannot be compared")
    runs, unseen = [run for one in held for run in one["runs"]], held[0]["setting"]["unseen"]
    print(table(runs, unseen))
    for name in names:
        if name.endswith(".svg"):
            Path(name).write_text(plot(runs, unseen))


if __name__ == "__main__":
    main(*sys.argv[1:])
