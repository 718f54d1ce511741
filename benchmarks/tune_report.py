"""The results of `tune.py`: a table and a plot.

    python benchmarks/tune_report.py build/tune.json [more.json ...] [plot.svg]

Every dot of the plot is a run, every bar the mean of a variant's runs: on the left for held-out
rows, on the right for kinds of prompts that were not trained on. Needs nothing but Python.
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
    """Runs by variant, in the order of the file; the first variant is the baseline."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        variants.setdefault(run["name"], []).append(run)
    return variants


def lengths(runs: Sequence[dict[str, Any]], column: str, unseen: Sequence[str]) -> list[float]:
    """The length of each run in a column; UNSEEN is the mean over all unseen kinds."""
    if column != UNSEEN:
        return [run["lengths"][column] for run in runs]
    return [statistics.mean(run["lengths"][kind] for kind in unseen) for run in runs]


def table(runs: Sequence[dict[str, Any]], unseen: Sequence[str]) -> str:
    """Mean and spread (half of the range over the seeds) by variant and set, and the gain over the
    first variant: on unseen kinds if there are any, else on held-out rows."""
    if not runs:
        return "no run has ended"
    variants = by_variant(sorted(runs, key=lambda run: run["seed"]))
    columns = [*runs[0]["lengths"], *([UNSEEN] if unseen else [])]
    judged = columns[-1] if unseen else columns[0]
    first = statistics.mean(lengths(next(iter(variants.values())), judged, unseen))
    head = ["variant", "seeds", "steps", "s", *columns, f"gain, {judged}"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for name, group in variants.items():
        cells = [name, str(len(group)), f"{group[0]['steps']:,}"]
        cells.append(f"{statistics.mean(run['seconds'] for run in group):.0f}")
        for column in columns:
            values = lengths(group, column, unseen)
            spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        gain = statistics.mean(lengths(group, judged, unseen)) / first - 1
        lines.append("| " + " | ".join([*cells, f"{100 * gain:+.1f} %"]) + " |")
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], unseen: Sequence[str]) -> str:
    """The plot as an SVG document."""
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
        parts += _panel([lengths(group, column, unseen) for group in variants.values()], left)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: Sequence[Sequence[float]], left: float) -> list[str]:
    low = min(map(min, rows))
    span = max(map(max, rows)) - low or 1.0

    def at(length: float) -> float:
        return left + 6 + (PANEL - 12) * (length - low) / span

    parts = []
    for index, row in enumerate(rows):
        y, mean = TOP + ROW * index + 11, statistics.mean(row)
        parts.append(
            f'<path d="M{left} {y}h{PANEL}" stroke="{COLOURS["line"]}"/>'
            f'<path d="M{at(mean):.1f} {y - 7}v14" stroke="{COLOURS["mean"]}" stroke-width="3"/>'
        )
        for length in row:
            parts.append(f'<circle cx="{at(length):.1f}" cy="{y}" r="3" fill="{COLOURS["run"]}"/>')
        parts.append(_text(left + PANEL + 6, y + 4, f"{mean:.3f}"))
    bottom = TOP + ROW * len(rows) + 14
    return [*parts, _text(left, bottom, f"{low:.3f}"),
            _text(left + PANEL, bottom, f"{low + span:.3f}", anchor="end")]  # fmt: skip


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{COLOURS["text"]}"'
    return f"<text {place}>{escape(text)}</text>"


def main(*names: str) -> None:
    """Print one table for files of the same setting; names that end with .svg get the plot."""
    files = [json.loads(Path(name).read_text()) for name in names if not name.endswith(".svg")]
    if any(file["setting"] != files[0]["setting"] for file in files):
        sys.exit("these files have different settings: their lengths cannot be compared")
    runs, unseen = [run for file in files for run in file["runs"]], files[0]["setting"]["unseen"]
    print(table(runs, unseen))
    for name in names:
        if name.endswith(".svg"):
            Path(name).write_text(plot(runs, unseen))


if __name__ == "__main__":
    main(*sys.argv[1:])
