"""Plots speed and memory of a training step beside the best peer, from committed figures.

pip install matplotlib
python benchmarks/plot_performance.py docs/performance.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DATA = Path(__file__).parent / "results" / "data" / "train_step.json"
OURS, PEER = "#1f6f8b", "#c9b79c"
PHASES = {"target": "#9db4c0", "supervision": "#62a87c", "forward": "#1f6f8b",
          "backward": "#0b3c49", "update": "#e07a3f"}  # fmt: skip


def pairs(axes, rows, key, peer, form, title):
    """Draw two bars per row, or one if the peer was not measured."""
    for index, row in enumerate(rows):
        own_bar = axes.bar(index - 0.2, row[key], 0.38, color=OURS, label="" if index else "fledge")
        axes.bar_label(own_bar, fmt=form, fontsize=7)
        if row[peer]:
            peer_bar = axes.bar(
                index + 0.2, row[peer], 0.38, color=PEER, label="" if index else "best peer"
            )
            axes.bar_label(peer_bar, fmt=form, fontsize=7)
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def main(path: str) -> None:
    rows = json.loads(DATA.read_text())["cases"]
    compared = [row for row in rows if row["compared"]]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"svg.hashsalt": "fledge"})
    figure, (speed, memory, phases) = plt.subplots(
        1, 3, figsize=(11, 3.2), constrained_layout=True, width_ratios=[4, 4, 3]
    )
    pairs(speed, compared, "tokens_per_s", "peer_tokens_per_s", "{:,.0f}", "tokens a second")
    speed.legend(frameon=False, fontsize=7, loc="upper left")
    pairs(memory, compared, "above_gib", "peer_above_gib", "%.1f",
          "GiB above weights and optimizer")  # fmt: skip
    left = [0.0] * len(rows)
    names = [row["name"].replace("\n", " ") for row in rows]
    for phase, colour in PHASES.items():
        share = [row["phases_ms"][phase] / row["step_ms"] for row in rows]
        phases.barh(names, share, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, share, strict=True)]
    phases.invert_yaxis()
    phases.set_title("share of a step", fontsize=9)
    phases.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    phases.tick_params(axis="y", labelsize=7)
    phases.legend(
        frameon=False, fontsize=6, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.1)
    )
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
