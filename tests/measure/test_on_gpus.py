"""The GPU speed-ups that fledge quotes are the measured ones."""

import re
from pathlib import Path

from fledge.measure.on_gpus import SOURCE, measured_gains
from fledge.recipe.shipped import shipped_recipes

ROOT = Path(__file__).parents[2]


def test_gpu_figures_match_the_results_page():
    """Compare with the first table of the results page, line by line."""
    page = (ROOT / SOURCE).read_text()
    rows = re.findall(r"^\| (?:EAGLE-3 chain|EAGLE-3 tree|P-EAGLE) \| (.*) \|$", page, flags=re.M)
    for quoted, cells in zip(measured_gains(), rows[:3], strict=True):
        length, *_, even, per_s, gain = (
            float(c.strip(" *")) for c in cells.split("|")[-9:] if "+" not in c
        )
        assert (quoted.length, quoted.break_even, quoted.speedup) == (
            float(length), float(even), float(gain),
        )  # fmt: skip
        assert quoted.tokens_per_s == float(per_s)
        assert quoted.recipe in shipped_recipes()
        assert f"({quoted.plain_tokens_per_s:.0f} tokens/s)" in page
        assert f"One {quoted.gpu}," in page
        assert f"after about {quoted.training_s:.0f} seconds of training" in page
