"""Plots methods after the same GPU seconds, from the results of race.py.

pip install matplotlib
python benchmarks/plot_race.py benchmarks/results/data/smollm2_race.json docs/race.svg
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

NAMES = {
    "smollm2_gpu": "EAGLE-3",
    "smollm2_dspark_gpu": "DSpark",
    "smollm2_dflash_gpu": "DFlash",
    "smollm2_peagle_gpu": "P-EAGLE",
}
SETS = {"mt_bench": "MT-bench", "gsm8k": "GSM8K", "alpaca": "Alpaca"}
COLOURS = ["#1f6f8b", "#62a87c", "#9a7fb8", "#e07a3f"]


def main(source: str, path: str) -> None:
    entrants = json.loads(Path(source).read_text())
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "fledge"})
    figure, axes = plt.subplots(figsize=(6.4, 3.0), constrained_layout=True)
    width = 0.8 / len(entrants)
    for index, (recipe, entrant) in enumerate(entrants.items()):
        seeds = [entrant["length"][name] for name in SETS]
        means = [statistics.mean(lengths) for lengths in seeds]
        spread = [
            [mean - min(lengths) for mean, lengths in zip(means, seeds, strict=True)],
            [max(lengths) - mean for mean, lengths in zip(means, seeds, strict=True)],
        ]
        places = [i + width * (index - (len(entrants) - 1) / 2) for i in range(len(SETS))]
        bars = axes.bar(places, means, width * 0.92, yerr=spread, color=COLOURS[index])
        bars.set_label(NAMES.get(recipe, Path(recipe).stem))
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_xticks(range(len(SETS)), SETS.values())
    axes.set(ylabel="tokens a round", ylim=(1, None))
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:3])
