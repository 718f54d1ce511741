"""Which worker is asked next, by the rules alone."""

import pytest

pytest.importorskip("ray", reason="needs the cluster extra")

from fledge.target.ray.fleet import Fleet

pytestmark = pytest.mark.cluster


def fleet(rank, workers):
    made = Fleet([(f"t{n}", None) for n in range(workers)], wait_s=1, release=list, rank=rank)
    for state in made._states:
        state.up = True
    return made


@pytest.mark.parametrize(("ranks", "workers"), [(8, 4), (4, 4), (3, 2), (2, 3)])
def test_ranks_with_one_question_each_keep_all_workers_busy(ranks, workers):
    """Each of them sees only its own questions: an empty fleet, over and over."""
    fleets = [fleet(rank, workers) for rank in range(ranks)]
    for _ in range(2 * workers):
        taken = [each._take(None) for each in fleets]
        counts = [sum(state.name == f"t{n}" for state in taken) for n in range(workers)]
        assert max(counts) - min(counts) <= 1
        for each, state in zip(fleets, taken, strict=True):
            each._leave(state)


def test_the_fewest_questions_come_first():
    one = fleet(0, 3)
    first, second, third = (one._take(None) for _ in range(3))
    assert {first.name, second.name, third.name} == {"t0", "t1", "t2"}
    one._leave(second)
    assert one._take(None) is second
    assert one._take(1).name == "t1"  # ranks that share rows name the worker
