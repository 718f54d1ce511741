"""`feature_dropout`: the step's seed decides which features are dropped, not the batch's layout."""

import pytest
import torch

from fledge import Eagle3TrainerModule
from fledge.methods.shared.unroll import dropped
from objective.naive_eagle3 import (
    make_documents,
    make_draft,
    make_head,
    packed_batch,
    padded_batch,
    vocabulary,
)

SHARE = 0.3
LENGTHS = [9, 1, 6, 13, 2]


def module_of(draft, **options):
    ids, mask = vocabulary()
    return Eagle3TrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=mask, ttt_steps=3,
        target_head=make_head(), **options,
    )  # fmt: skip


def loss_and_gradients(module, batch, seed):
    module.zero_grad()
    out = module(**batch, seed=seed)
    out.loss.backward()
    return out.loss, [p.grad.clone() for p in module.draft_model.parameters()]


def test_channels_are_dropped_at_the_given_rate_and_the_rest_rescaled():
    words = torch.randint(-(2**62), 2**62, (500,), generator=torch.Generator().manual_seed(0))
    values = torch.ones(500, 40, dtype=torch.float64)
    kept = dropped(values, words, SHARE)
    assert set(kept.unique().tolist()) == {0.0, 1 / (1 - SHARE)}
    assert float((kept == 0).double().mean()) == pytest.approx(SHARE, abs=0.01)
    assert torch.equal(dropped(values[7:9], words[7:9], SHARE), kept[7:9])


def test_packed_equals_padded_and_the_seed_decides():
    draft, documents = make_draft(), make_documents(LENGTHS)
    module = module_of(draft, feature_dropout=SHARE)
    padded = padded_batch(documents)
    packed = packed_batch([documents[:2], documents[2:4], documents[4:]], 20)
    loss, gradients = loss_and_gradients(module, padded, seed=5)
    for batch, seed, same in ((packed, 5, True), (padded, 6, False)):
        other_loss, other_gradients = loss_and_gradients(module, batch, seed=seed)
        equal = [
            torch.allclose(*pair, atol=1e-9)
            for pair in zip(gradients, other_gradients, strict=True)
        ]
        assert torch.allclose(loss, other_loss, atol=1e-9) is same
        assert all(equal) is same


def test_nothing_is_dropped_in_eval_mode():
    draft, batch = make_draft(), padded_batch(make_documents(LENGTHS))
    draft.eval()
    whole, sparse = module_of(draft), module_of(draft, feature_dropout=SHARE)
    assert torch.equal(whole(**batch).loss, sparse(**batch, seed=1).loss)
    with pytest.raises(ValueError, match="feature_dropout"):
        module_of(draft, feature_dropout=1.0)
