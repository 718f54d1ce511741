"""Plots chain, tree and parallel drafting side by side, from committed figures.

pip install matplotlib
python benchmarks/plot_methods.py docs/methods.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DATA = Path(__file__).parent / "results" / "data"
COLOURS = ["#1f6f8b", "#62a87c", "#e07a3f"]


def main(path: str) -> None:
    places = json.loads((DATA / "smollm2_methods.json").read_text())
    methods = next(iter(places.values()))  # lengths are shown for the first place
    sets = list(next(iter(methods.values()))["by_set"])
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "fledge"})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 3.0), constrained_layout=True, width_ratios=[3, 2]
    )
    for index, name in enumerate(methods):
        shift, colour = 0.27 * (index - 1), COLOURS[index]
        lengths = [methods[name]["by_set"][prompt_set] for prompt_set in sets]
        bars = left.bar([i + shift for i in range(len(sets))], lengths, 0.25, color=colour)
        bars.set_label(name)
        left.bar_label(bars, fmt="%.2f", fontsize=7)
        gains = [figures[name]["speedup"] for figures in places.values()]
        bars = right.bar([i + shift for i in range(len(gains))], gains, 0.25, color=colour)
        right.bar_label(bars, fmt="%.2f", fontsize=7)
    left.set_xticks(range(len(sets)), sets)
    left.set(ylabel="tokens a round", ylim=(1, None))
    left.legend(frameon=False, fontsize=7)
    right.set_xticks(range(len(places)), places)
    right.axhline(1, color="#888", linewidth=0.8)
    right.set(ylabel="measured speed-up, one text at a time")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
