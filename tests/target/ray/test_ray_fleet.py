"""Which worker a fleet chooses next, tested without a cluster."""

import pytest

pytest.importorskip("ray", reason="needs the cluster extra")

from fledge.target.ray.fleet import Fleet

pytestmark = pytest.mark.cluster


def fleet(rank, workers):
    result = Fleet([(f"t{n}", None) for n in range(workers)], wait_s=1, release=list, rank=rank)
    for state in result._states:
        state.up = True
    return result


@pytest.mark.parametrize(("ranks", "workers"), [(8, 4), (4, 4), (3, 2), (2, 3)])
def test_ranks_with_one_question_each_keep_all_workers_busy(ranks, workers):
    """Each rank sees only its own questions, so its fleet looks idle every time."""
    fleets = [fleet(rank, workers) for rank in range(ranks)]
    for _ in range(2 * workers):
        states = [rank_fleet._take(None) for rank_fleet in fleets]
        counts = [sum(state.name == f"t{n}" for state in states) for n in range(workers)]
        assert max(counts) - min(counts) <= 1
        for rank_fleet, state in zip(fleets, states, strict=True):
            rank_fleet._leave(state)


def test_the_worker_with_the_fewest_questions_comes_first():
    rank_fleet = fleet(0, 3)
    first, second, third = (rank_fleet._take(None) for _ in range(3))
    assert {first.name, second.name, third.name} == {"t0", "t1", "t2"}
    rank_fleet._leave(second)
    assert rank_fleet._take(None) is second
    assert rank_fleet._take(1).name == "t1"  # ranks that share rows name the worker
