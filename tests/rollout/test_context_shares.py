"""Context parallelism: the plans of the ranks partition the whole plan, evenly."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import DOCUMENTS, packed, plan_elements

from fledge.methods.peagle.plan import plan_parallel
from fledge.rollout.context import ContextRanks
from fledge.rollout.plan import ELEMENT, plan_rollout


def shares(make, size):
    return [make(ranks=ContextRanks(rank, size, None)) for rank in range(size)]


@settings(max_examples=100, deadline=None)
@given(
    documents=DOCUMENTS,
    num_depths=st.integers(1, 5),
    size=st.integers(2, 6),
    keep=st.sampled_from([1.0, 0.5]),
)
def test_shares_partition_the_plan(documents, num_depths, size, keep):
    masks = packed(documents, sum(map(len, documents)) + 2)

    def make(**options):
        return plan_rollout(masks, num_depths=num_depths, keep=keep, seed=3, **options)

    whole, parts = make(), shares(make, size)
    part_elements = [plan_elements(part) for part in parts]
    assert sum(map(len, part_elements)) == len(whole.head)
    assert {e: t for part in part_elements for e, t in part.items()} == plan_elements(whole)
    owned = torch.cat([part.share.slot_O for part in parts])
    assert owned.sort().values.tolist() == whole.slot_T.tolist()
    assert sum(part.step_valid_K for part in parts).tolist() == whole.step_valid_K.tolist()
    if keep < 1:
        asked_counts = [int(plan.asked_MK.sum()) for plan in (*parts, whole)]
        assert sum(asked_counts[:-1]) == asked_counts[-1]
    for part in parts:  # all gathered keys end up in the order of the key axis
        gathered = torch.full((size * part.share.gathering.longest,), -1)
        for rank, other in enumerate(parts):
            begin = rank * part.share.gathering.longest
            gathered[begin : begin + len(other.share.slot_O)] = other.share.slot_O
        assert gathered[part.share.gathering.place_T].tolist() == whole.slot_T.tolist()
        tokens = part.share.slot_L
        for depth, rows in enumerate(part.depths):  # the token k later is k entries later
            read = tokens[part.share.read_N[: len(rows)] + depth]
            assert read.tolist() == (whole.slot_T[rows.slot_N] + depth).tolist()


@settings(max_examples=40, deadline=None)
@given(documents=DOCUMENTS, size=st.integers(2, 4), partitions=st.integers(1, 3))
def test_parallel_shares_partition_the_plan(documents, size, partitions):
    masks = packed(documents, sum(map(len, documents)) + 2)
    options = {"num_depths": 4, "ratio": 0.7, "ratio_min": 0.2, "partitions": partitions}

    def make(**rank_options):
        return plan_parallel(masks, seed=3, **options, **rank_options)

    whole, parts = make(), shares(make, size)
    # otherwise ranks would wait for each other forever
    assert {len(part.segments) for part in parts} == {len(whole.segments)}
    elements = {e: t for part in parts for e, t in plan_elements(part).items()}
    assert elements == plan_elements(whole)
    assert sum(len(part.head) for part in parts) == len(whole.head)


def test_work_is_balanced_wherever_the_answers_are():
    """Covers the work of a rank, counted in slots, and its number of query-key pairs."""
    for prompt in (0, 3000, 3900):
        for count in (1, 3):
            document = [False] * prompt + [True] * (4000 - prompt)
            masks = packed([document] * count, 4000 * count)
            parts = shares(lambda m=masks, **options: plan_rollout(m, num_depths=7, **options), 4)
            load = [len(p.share.slot_O) + ELEMENT * sum(p.counts) for p in parts]
            assert spread(load) < 0.01
            if prompt == 0:
                keys = [[rows.slot_N - rows.first_N + 1 for rows in p.depths] for p in parts]
                assert spread([sum(int(seen.sum()) for seen in depths) for depths in keys]) < 0.05


def spread(values):
    """The largest deviation from the mean, relative to the mean."""
    return np.abs(np.array(values) / np.mean(values) - 1).max()
