"""What is said to be gained on a GPU is what was measured there."""

import re
from pathlib import Path

from fledge.measure.on_gpus import SOURCE, measured_gains
from fledge.recipe.shipped import shipped_recipes

ROOT = Path(__file__).parents[2]


def test_figures_of_a_gpu_are_those_of_the_results():
    """The first table of the page, line by line."""
    page = (ROOT / SOURCE).read_text()
    rows = re.findall(r"^\| (?:EAGLE-3 chain|EAGLE-3 tree|P-EAGLE) \| (.*) \|$", page, flags=re.M)
    for known, cells in zip(measured_gains(), rows[:3], strict=True):
        length, *_, even, per_s, gain = (
            float(c.strip(" *")) for c in cells.split("|")[-9:] if "+" not in c
        )
        assert (known.length, known.break_even, known.speedup) == (
            float(length), float(even), float(gain),
        )  # fmt: skip
        assert known.tokens_per_s == float(per_s)
        assert known.recipe in shipped_recipes()
        assert f"({known.plain_tokens_per_s:.0f} tokens/s)" in page
        assert f"One {known.gpu}," in page
        assert f"after about {known.training_s:.0f} seconds of training" in page
