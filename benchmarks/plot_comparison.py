"""Plots EAGLE-3 against P-EAGLE at equal training time, from committed figures.

pip install matplotlib
python benchmarks/plot_comparison.py docs/peagle_comparison.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DATA = Path(__file__).parent / "results" / "data"
COLOURS = {"EAGLE-3": "#1f6f8b", "P-EAGLE": "#e07a3f"}


def main(path: str) -> None:
    curves = json.loads((DATA / "smollm2_curves.json").read_text())
    prompts = json.loads((DATA / "smollm2_prompts.json").read_text())
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "fledge"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), constrained_layout=True)
    for name, points in curves.items():
        seconds = [point["seconds"] for point in points]
        lengths = [point["length"] for point in points]
        left.plot(seconds, lengths, "o-", color=COLOURS[name], label=name, markersize=3)
    left.set(xlabel="seconds of training, one H200", ylabel="acceptance length, held-out rows")
    left.legend(frameon=False)
    marks = {"MT-bench": "-", "GSM8K": "--", "Alpaca": ":"}
    for name, sets in prompts.items():
        for prompt_set, style in marks.items():
            joint = sets[prompt_set]["joint"]
            right.plot(
                range(1, len(joint) + 1), joint, style, color=COLOURS[name],
                label=f"{name}, {prompt_set} ({sets[prompt_set]['length']:.2f})",
            )  # fmt: skip
    right.set(xlabel="drafted token", ylabel="accepted with all before it", ylim=(0, 1))
    right.legend(frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
