"""A step computes little more than the least that its definition needs, at 8B shapes."""

import pytest

from work_table import CASES, LIMIT, lines

SHORT = {name: case for name, case in CASES.items() if case.seq == 2048}


@pytest.mark.parametrize("name", SHORT)
def test_no_phase_computes_much_more_than_the_least(name):
    for line in lines(name, SHORT[name]):
        assert line["ratio"] > 0.9999, line  # the least is a bound
        if line["ratio"] > LIMIT:
            assert line["reason"], line
        if line["phase"] in ("forward", "update"):
            assert line["ratio"] < 1.01, line
