"""Chain, tree and parallel drafting beside each other, drawn from committed figures.

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
    methods = json.loads((DATA / "smollm2_methods.json").read_text())
    sets = list(next(iter(methods.values()))["by_set"])
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "fledge"})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 3.0), constrained_layout=True, width_ratios=[3, 2]
    )
    for index, (name, found) in enumerate(methods.items()):
        places = [place + 0.27 * (index - 1) for place in range(len(sets))]
        lengths = [found["by_set"][one] for one in sets]
        bars = left.bar(places, lengths, 0.25, color=COLOURS[index], label=name)
        left.bar_label(bars, fmt="%.2f", fontsize=7)
    left.set_xticks(range(len(sets)), sets)
    left.set(ylabel="tokens a round", ylim=(1, None))
    left.legend(frameon=False, fontsize=7)
    names = list(methods)
    bars = right.bar(names, [methods[name]["speedup"] for name in names], color=COLOURS)
    right.bar_label(bars, fmt="%.2f", fontsize=7)
    right.axhline(1, color="#888", linewidth=0.8)
    right.set(ylabel="measured speed-up, 2 CPU cores")
    right.tick_params(axis="x", labelsize=7)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
