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


@pytest.mark.parametrize(
    ("seeds", "medians", "fresh_median"),
    [(False, (4.5, 2.8, 1.2, 1.2), 6.5), (True, (2.6, 2.6, 1.2, 1.2), 2.0)],
)
def test_leave_one_out_errors_are_as_documented(runs, seeds, medians, fresh_median):
    for share, allowed in zip((0.2, 0.4, 0.6, 0.8), medians, strict=True):
        ends = {name: end_of(run, share, runs, seeds=seeds) for name, run in runs.items()}
        ends = {name: end for name, end in ends.items() if end is not None}
        errors = {name: 100 * abs(end.length / runs[name].length - 1) for name, end in ends.items()}
        inside = [end.low <= runs[name].length <= end.high for name, end in ends.items()]
        assert len(errors) >= (15 if share == 0.2 else 18)
        assert statistics.median(errors.values()) < allowed, (share, errors)
        assert statistics.mean(inside) >= 0.8, share
        fresh = [error for name, error in errors.items() if name.startswith(FRESH)]
        assert statistics.median(fresh) < fresh_median, (share, fresh)


def test_other_seeds_are_known_only_on_request(runs):
    run = runs["h200_e3_8m_shipped_0"]
    without_seeds, with_seeds = (
        {k.name for k in run.known(runs, seeds=seeds)} for seeds in (False, True)
    )
    assert with_seeds - without_seeds == {"h200_e3_8m_shipped_1", "h200_e3_8m_shipped_2"}
    assert "h200_e3_25m_shipped_0" in without_seeds
    assert "h200_e3_8m_shipped_0" not in with_seeds
    assert not any("stories" in name or "peagle" in name for name in with_seeds)
