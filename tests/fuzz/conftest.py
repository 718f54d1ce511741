"""Runs the examples of a case, which are the same in every CI run."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.survive import GROWTH, peak_bytes, survives


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory):
    """Try a case's examples: `fuzzed(CaseClass)`."""

    def fuzz(make):
        case = make(tmp_path_factory.mktemp("fuzz"))
        outcomes = []
        before = peak_bytes()

        @settings(
            max_examples=case.examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.randoms(use_true_random=False))
        def one(rng):
            outcomes.append(survives(case, rng)[0])

        case.restore()
        case.read()  # the unchanged files are accepted
        one()
        assert "refused" in outcomes, "nothing was spoiled"
        assert peak_bytes() - before < GROWTH

    return fuzz
