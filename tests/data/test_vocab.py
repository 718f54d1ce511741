"""The draft vocabulary: selection, maps, coverage, files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.core.errors import BadInput
from fledge.data.vocab import DraftVocabulary, count_supervised, coverage_curve, select_vocabulary

counts = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(np.array)


def selected_by_definition(counts_V, size, special):
    """The definition in docs/semantics.md, section Draft vocabulary, taken literally."""
    order = []
    for token in special:
        if token is not None and token not in order:
            order.append(token)
    seen = [i for i in range(len(counts_V)) if counts_V[i] > 0]
    for token in sorted(seen, key=lambda i: (-counts_V[i], i)) + list(range(len(counts_V))):
        if token not in order:
            order.append(token)
    return sorted(order[:size])


@given(counts_V=counts, size=st.none() | st.integers(1, 50), data=st.data())
def test_selection_and_maps(counts_V, size, data):
    special = data.draw(
        st.lists(st.one_of(st.none(), st.integers(0, len(counts_V) - 1)), max_size=4)
    )
    vocabulary = select_vocabulary(counts_V, size, special_ids=special)
    expected = list(range(len(counts_V)))  # without a size, or a sufficient one: the identity
    if size is not None and size < len(counts_V):
        expected = selected_by_definition(counts_V, size, special)
    ids = vocabulary.selected_token_ids
    assert ids.tolist() == expected
    assert (np.arange(vocabulary.size) + vocabulary.d2t).tolist() == expected
    assert np.flatnonzero(vocabulary.t2d).tolist() == expected
    if counts_V.sum():
        assert vocabulary.coverage == pytest.approx(counts_V[ids].sum() / counts_V.sum())
    if len(ids) == len(counts_V):
        assert vocabulary.coverage == 1.0
        assert not vocabulary.d2t.any()


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_the_size_must_be_a_positive_integer(size):
    with pytest.raises(BadInput, match="draft_vocab_size"):
        select_vocabulary(np.ones(9, dtype=np.int64), size)


def test_only_supervised_tokens_count():
    rows = [
        (np.array([5, 5, 1], np.int32), np.array([1, 0, 1], np.uint8)),
        (np.array([1, 2], np.int32), np.array([1, 0], np.uint8)),
    ]
    assert count_supervised(rows, 6).tolist() == [0, 2, 0, 0, 0, 1]
    with pytest.raises(BadInput, match="outside the vocabulary"):
        count_supervised(rows, 3)


def test_a_saved_vocabulary_loads_equal(tmp_path):
    vocabulary = select_vocabulary(
        np.array([3, 0, 9, 1, 0, 2]), 3, special_ids=[1], fingerprint="f"
    )
    path = tmp_path / "vocab.safetensors"
    vocabulary.save(path)
    again = DraftVocabulary.load(path)
    assert again.selected_token_ids.tolist() == vocabulary.selected_token_ids.tolist() == [0, 1, 2]
    assert (again.coverage, again.fingerprint) == (vocabulary.coverage, "f")
    assert again.digest() == vocabulary.digest()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInput, match="not a draft vocabulary"):
        DraftVocabulary.load(path)


def test_coverage_curve():
    assert coverage_curve(np.array([1, 0, 3]), [1, 2, 9]) == [(1, 0.75), (2, 1.0), (9, 1.0)]
