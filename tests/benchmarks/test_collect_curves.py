"""Forecasts guided by known runs are as accurate on real runs as benchmarks/results/forecast.md
states."""

import json
import statistics
from pathlib import Path

import pytest

from collect_curves import Kept, end_of

PLACE = Path(__file__).parents[1] / "train" / "curves"
FRESH = "h200_e3_"  # no constant was fitted to these


@pytest.fixture(scope="module")
def runs():
    return {
        path.stem: Kept.from_json(json.loads(path.read_text()))
        for path in sorted(PLACE.glob("*.json"))
    }


def test_leave_one_out_errors_are_as_documented(runs):
    for share, allowed in zip((0.2, 0.4, 0.6, 0.8), (3.5, 2.2, 1.4, 0.9), strict=True):
        ends = {name: end_of(run, share, runs) for name, run in runs.items()}
        ends = {name: end for name, end in ends.items() if end is not None}
        errors = {name: 100 * abs(end.length / runs[name].length - 1) for name, end in ends.items()}
        inside = [end.low <= runs[name].length <= end.high for name, end in ends.items()]
        assert len(errors) >= (15 if share == 0.2 else 18)
        assert statistics.median(errors.values()) < allowed, (share, errors)
        assert statistics.mean(inside) >= 0.8, share
        fresh = [error for name, error in errors.items() if name.startswith(FRESH)]
        assert statistics.median(fresh) < 2.1, (share, fresh)


def test_only_runs_of_the_same_recipe_are_known(runs):
    known = {run.name for run in runs["h200_e3_8m_shipped_0"].known(runs)}
    assert known == {"h200_e3_8m_shipped_1", "h200_e3_8m_shipped_2", *(
        f"h200_e3_25m_shipped_{seed}" for seed in (0, 1)
    )}  # fmt: skip
