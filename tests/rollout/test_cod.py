"""COD sampling against the rules of docs/semantics.md, P-EAGLE."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge import generate_cod_sample_indices
from fledge.rollout.slots import Documents, draw_seed, sample_depths

DOCUMENTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4)
RATIOS = st.sampled_from([(0.7, 0.2), (0.5, 0.0), (1.0, 1.0), (0.3, 0.9), (0.01, 0.0)])


def sample(documents, *, num_depths=5, ratios=(0.7, 0.2), seed=0):
    lengths = [len(d) for d in documents]
    if not documents:
        return []
    slots = Documents(
        np.array([flag for d in documents for flag in d]),
        ordinal=np.repeat(np.arange(len(lengths)), lengths),
        place=np.concatenate([np.arange(n) for n in lengths]),
    )
    deepest = sample_depths(
        slots,
        num_depths=num_depths,
        ratio=ratios[0],
        ratio_min=ratios[1],
        seed=seed,
    )
    return [part.tolist() for part in np.split(deepest, np.cumsum(lengths)[:-1])]


@settings(max_examples=200, deadline=None)
@given(documents=DOCUMENTS, ratios=RATIOS, num_depths=st.integers(1, 6), seed=st.integers(0, 99))
def test_samples_follow_every_rule(documents, ratios, num_depths, seed):
    sampled = sample(documents, num_depths=num_depths, ratios=ratios, seed=seed)
    for supervised, deepest in zip(documents, sampled, strict=True):
        valid = sum(supervised)
        kept = []
        for d in range(1, num_depths):
            pool = [p for p in range(1, len(supervised)) if supervised[p]]
            if d > 1:
                pool = [p + 1 for p in kept if p + 1 < len(supervised) and supervised[p + 1]]
            kept = [a + d for a, last in enumerate(deepest) if last >= d]
            assert set(kept) <= set(pool)  # nested, supervised, inside the document, p > 0
            size = int(max(0, valid - d) * max(ratios[0] ** d, ratios[1]))
            assert len(kept) == min(size, len(pool))
        assert max(deepest) <= num_depths - 1


@settings(max_examples=100, deadline=None)
@given(document=st.lists(st.booleans(), max_size=20), num_depths=st.integers(1, 6), ratios=RATIOS)
def test_the_public_function_lists_elements_depth_by_depth(document, num_depths, ratios):
    mask = torch.tensor(document, dtype=torch.long)
    draws = [
        generate_cod_sample_indices(
            len(document), shape, num_depths, *ratios, generator=torch.Generator().manual_seed(3)
        )
        for shape in (mask, mask[None], torch.cat([mask, torch.ones(5)]))
    ]
    anchor, depth = draws[0]
    assert all(torch.equal(anchor, a) and torch.equal(depth, d) for a, d in draws)
    assert anchor[depth == 0].tolist() == list(range(len(document)))
    assert (depth.diff() >= 0).all()
    for d in range(num_depths):
        assert (anchor[depth == d].diff() > 0).all()
    deep = depth > 0
    assert (anchor >= 0).all()
    assert mask[(anchor + depth)[deep]].all()
    elements = set(zip(anchor.tolist(), depth.tolist(), strict=True))
    assert all((a, d - 1) in elements for a, d in elements if d > 0)
    seed = draw_seed(torch.Generator().manual_seed(3))
    documents = [document] if document else []
    expected = sample(documents, num_depths=num_depths, ratios=ratios, seed=seed)
    assert elements == {
        (a, d) for row in expected for a, last in enumerate(row) for d in range(last + 1)
    }


@settings(max_examples=50, deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 9), pad=st.integers(0, 3))
def test_a_documents_sample_does_not_depend_on_its_place(documents, seed, pad):
    alone = [sample([document], seed=seed)[0] for document in documents]
    assert sample(documents, seed=seed) == alone
    assert sample(documents[::-1], seed=seed) == alone[::-1]
    padded = sample([document + [False] * pad for document in documents], seed=seed)
    assert [row[: len(d)] for row, d in zip(padded, documents, strict=True)] == alone


def test_the_generator_decides_what_is_sampled():
    def draw(seed):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return generate_cod_sample_indices(
            50, torch.ones(50), 4, 0.7, 0.2, generator=generator
        )[0].tolist()  # fmt: skip

    assert draw(1) == draw(1) != draw(2)
    torch.manual_seed(5)
    from_torch = draw(None)
    assert draw(None) != from_torch
    torch.manual_seed(5)
    assert draw(None) == from_torch


def draw_probabilities(supervised, num_depths, ratios):
    """Every possible draw of one document with its probability, straight from docs/semantics.md. At
    each depth, all sets of n_d positions of the pool (or the whole pool) are equally likely."""
    valid, probabilities = sum(supervised), Counter()

    def follow(depth, pool, deepest, probability):
        size = int(max(0, valid - depth) * max(ratios[0] ** depth, ratios[1]))
        if depth == num_depths or size == 0:
            probabilities[deepest] += probability
            return
        subsets = list(itertools.combinations(pool, min(size, len(pool))))
        for kept in subsets:
            reached = tuple(
                depth if anchor + depth in kept else last for anchor, last in enumerate(deepest)
            )
            following = [p + 1 for p in kept if supervised[p + 1 : p + 2] == [True]]
            follow(depth + 1, following, reached, probability / len(subsets))

    pool = [p for p in range(1, len(supervised)) if supervised[p]]
    follow(1, pool, (0,) * len(supervised), 1.0)
    return probabilities


@pytest.mark.parametrize(
    ("document", "num_depths", "ratios"),
    [
        ("1111111", 4, (0.7, 0.4)),  # sizes 4, 2, 1
        ("1111111", 4, (0.5, 0.5)),  # 3, 2, 2: does not shrink; rollouts end at the last position
        ("0110111", 3, (0.5, 0.5)),  # 2, 1; every second rollout ends at a gap
        ("11011011", 3, (0.6, 0.6)),  # 3, 2; only two positions of the pool continue
        ("10111101", 5, (0.4, 0.4)),  # 2, 1, 1, 1
    ],
)
def test_every_draw_has_the_probability_of_the_definition(document, num_depths, ratios):
    """Not only means but the whole distribution, by a chi-square test over seeds 0 .. 2499."""
    supervised, runs = [c == "1" for c in document], 2500
    expected = draw_probabilities(supervised, num_depths, ratios)
    assert abs(sum(expected.values()) - 1) < 1e-9
    drawn = Counter(
        tuple(sample([supervised], num_depths=num_depths, ratios=ratios, seed=seed)[0])
        for seed in range(runs)
    )
    assert set(drawn) <= set(expected)
    distance = sum((drawn[d] - runs * p) ** 2 / (runs * p) for d, p in expected.items())
    freedom = len(expected) - 1
    assert distance < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_depths": 0}, "num_depths"),
        ({"num_depths": 1.0}, "num_depths"),
        ({"num_depths": True}, "num_depths"),
        ({"down_sample_ratio": 0.0}, "down_sample_ratio"),
        ({"down_sample_ratio": 1.1}, "down_sample_ratio"),
        ({"down_sample_ratio_min": -0.1}, "down_sample_ratio_min"),
        ({"seq_length": 4}, "loss_mask"),
        ({"loss_mask": torch.ones(2, 3)}, "one row at a time"),
    ],
)
def test_errors_name_the_bad_option(change, field):
    options = {
        "seq_length": 3, "loss_mask": torch.ones(3), "num_depths": 2,
        "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=field):
        generate_cod_sample_indices(**(options | change))
