"""The objective of native multi-token heads against a loop over anchors, steps and keys."""

import pytest

from objective.cases import assert_matches_textbook, run
from objective.naive_eagle3 import padded_batch
from objective.naive_mtp import documents_of, make_module, naive_mtp


@pytest.mark.parametrize("attention", ["fast", "reference"])
def test_loss_and_gradients_match_the_textbook(attention):
    module, documents = make_module(attention=attention), documents_of()
    result = run(module, padded_batch(documents))
    assert_matches_textbook(module, result, naive_mtp(module.draft_model, documents, steps=4))
