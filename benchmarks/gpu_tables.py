"""Writes the tables of README.md and docs/performance.md anew from what `gpu_round.py` measured.

    python benchmarks/gpu_tables.py [--results benchmarks/results/data/gpu_round]

A table follows its mark, `<!-- table: NAME -->`; text around it stays as it is. All tables of a
round, with commit and versions, go to benchmarks/results/gpu_round.md.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import step_table
from fledge.core.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "data" / "gpu_round"
PEERS = {  # tokens/s of the best other trainer; its GiB above weights and optimizer
    "EAGLE-3, 8B, 4 x 2048": ("16,501 (speculators)", "21 and more"),
    "EAGLE-3, 1B, 8 x 2048": ("45,989 (TorchSpec)", "34 and more"),
    "P-EAGLE, 8B, 2 x 2048, 8 depths, 4 layers": ("10,318 (SpecForge)", "15"),
    f"DFlash, {step_table.BLOCKS}": ("14,417 (speculators)", "22, 25"),
}
SHOWN = (*PEERS, "the same, fp8 target, depth_keep 0.7", f"DSpark, {step_table.BLOCKS}")

Figures = dict[str, Any]  # step of the round -> what it measured


def steps(figures: Figures) -> list[str]:
    rows = {row["step"]: row for row in figures["step_table"]["rows"]}
    lines = [
        "| | fledge, tokens/s | best other trainer "
        "| fledge, GiB above weights and optimizer | other trainers |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        if name in SHOWN:
            speed, memory = PEERS.get(name, ("", ""))
            mine, above = f"{row['tokens_per_s']:,}", f"{row['peak_above_gib'] or 0:.1f}"
            lines.append(step_table.markdown_line([name, mine, speed, above, memory]))
    return lines


def all_steps(figures: Figures) -> list[str]:
    rows = [r for r in figures["step_table"]["rows"] if r["step"] not in step_table.SMALL_CASES]
    marks = ["---", "--:", "--:", "---", *["--:"] * 4]
    lines = [step_table.markdown_line(step_table.COLUMNS), step_table.markdown_line(marks)]
    return lines + [step_table.markdown_line(step_table.table_row(row)) for row in rows]


def small_steps(figures: Figures) -> list[str]:
    lines = ["| step | tokens/s | step ms |", "|---|--:|--:|"]
    for row in figures["step_table"]["rows"]:
        if row["step"] in step_table.SMALL_CASES:
            cells = [row["step"], f"{row['tokens_per_s']:,}", f"{row['step_ms']:.1f}"]
            lines.append(step_table.markdown_line(cells))
    return lines


def race(figures: Figures) -> list[str]:
    together = {
        row["way"]: row for row in figures["batch_16"].get("rows", ()) if row["batch"] == 16
    }
    sets = ("mt_bench", "gsm8k", "alpaca")
    names = ["recipe", "steps", "MT-bench", "GSM8K", "Alpaca", "speed-up, one text at a time"]
    names += ["16 at a time"] if together else []
    lines = [step_table.markdown_line(names), "|---|" + "--:|" * (len(names) - 1)]
    for recipe, draft in figures["race"]["recipes"].items():
        if "error" in draft:
            continue
        cells = [f"`{recipe}`", f"{draft['steps']:,}"]
        cells += [f"{draft['length'][f'eval_{name}']:.2f}" for name in sets]
        cells += [f"{draft['speed']['measured_speedup_live_sample'] or float('nan'):.2f}"]
        if together:
            way = together.get(recipe.removeprefix("smollm2_"))
            cells += [f"{way['against_plain']:.2f}" if way else ""]
        lines.append(step_table.markdown_line(cells))
    return lines


def peer(figures: Figures) -> list[str]:
    lines = ["| settings | steps | tokens/s | MT-bench | GSM8K | Alpaca | live speed-up |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for recipe, draft in figures["against_peer"].items():
        if isinstance(draft, dict):
            gain = draft["live"]["speed"]["measured_speedup_live_sample"]
            cells = [Path(recipe).stem, f"{draft['steps']:,}", f"{draft['tokens_per_s'][0]:,.0f}"]
            cells += [f"{draft['length'][s][0]:.2f}" for s in ("mt_bench", "gsm8k", "alpaca")]
            lines.append(step_table.markdown_line([*cells, f"{gain:.2f}"]))
    return lines


Table = Callable[[Figures], list[str]]
TABLES: dict[str, tuple[str, Table]] = {  # name -> step of the round, maker
    "steps": ("step_table", steps),
    "all-steps": ("step_table", all_steps),
    "small-steps": ("step_table", small_steps),
    "race": ("race", race),
    "peer": ("against_peer", peer),
}


def tables(figures: Figures) -> Iterator[tuple[str, list[str]]]:
    """Those whose step was measured."""
    for name, (step, make) in TABLES.items():
        if "error" not in figures.get(step, {"error": ""}):
            yield name, make(figures)


def renewed(text: str, name: str, table: list[str]) -> str:
    """The text with its table of that name replaced, if it has one."""
    mark = f"<!-- table: {name} -->"
    before, found, rest = text.partition(mark)
    if not found:
        return text
    lines = rest.lstrip("\n").split("\n")
    while lines and lines[0].startswith("|"):
        lines.pop(0)
    return "\n".join([before + mark, *table, *lines])


def pages(root: Path, results: Path) -> Iterator[tuple[Path, str]]:
    """Each page, as it should be."""
    files = sorted(results.glob("*.json"))
    calls = {path.stem: json.loads(path.read_text()) for path in files}
    figures = {name: of for call in calls.values() for name, of in call["steps"].items()}
    made = dict(tables(figures))
    for page in (root / "README.md", root / "docs" / "performance.md"):
        text = page.read_text()
        for name, table in made.items():
            text = renewed(text, name, table)
        yield page, text
    yield root / "benchmarks" / "results" / "gpu_round.md", summary(calls, figures, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=ROOT, help="whose README.md and docs change")
    args = parser.parse_args()
    for page, text in pages(args.root, args.results):
        write_text(page, text)


def summary(calls: dict[str, Any], figures: Figures, made: dict[str, list[str]]) -> str:
    lines = ["# A round on a GPU", ""]
    lines += ["Measured by `benchmarks/gpu_round.py`, written by `benchmarks/gpu_tables.py` from"]
    lines += ["the calls' files in `data/gpu_round`."]
    lines += [""]
    for name, call in calls.items():
        about = ", ".join(f"{key} {call[key]}" for key in ("device", "torch", "commit", "date"))
        took = (f"{step} {of['seconds_taken']:.0f} s" for step, of in call["steps"].items())
        lines += [f"- `{name}`: {about}; {', '.join(took)}"]
    for step, of in figures.items():
        if "error" in of:
            lines += [f"- `{step}` failed: {of['error'].splitlines()[0][:200]}"]
    if tests := figures.get("gpu_tests", {}).get("summary"):
        lines += ["", f"GPU tests: {tests}"]
    if kernels := figures.get("kernel_errors", {}).get("cases"):
        wrong = len(figures["kernel_errors"]["wrong"])
        lines += ["", f"Kernels against float64: {len(kernels)} cases, {wrong} wrong"]
    for name, table in made.items():
        lines += ["", f"## {name}", "", *table]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
