"""EAGLE-1's objective against a textbook version, and the equalities every objective satisfies."""

import numpy as np
import pytest
import torch

from fledge.methods.eagle1.objective import Eagle1TrainerModule
from fledge.methods.shared.unroll import uniform_noise
from fledge.rollout.slots import Documents, slot_words
from objective.cases import run
from objective.naive_eagle1 import (
    SEED,
    D,
    V,
    documents_of,
    make_draft,
    make_module,
    naive_eagle1,
)
from objective.naive_eagle3 import padded_batch


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_loss_and_gradients_match_the_textbook(layers, noise, fc_bias):
    draft, documents = make_draft(layers=layers, fc_bias=fc_bias), documents_of()
    options = {"feature_weight": 0.7, "token_weight": 0.3}
    module = make_module(draft, feature_noise=noise, **options)
    out, gradients = run(module, padded_batch(documents), seed=SEED)
    draft.zero_grad()
    loss, count, hits = naive_eagle1(draft, documents, noise=noise, **options)
    loss.backward()
    # the noise is drawn in fp32 but added to fp64 features
    tolerance = 1e-10 if noise == 0 else 1e-7
    torch.testing.assert_close(out.loss, loss, rtol=tolerance, atol=tolerance)
    for name, gradient in gradients.items():
        expected = dict(draft.named_parameters())[name].grad
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)
    assert out.charged.tolist() == [count, 0, 0, 0, 0]
    assert out.correct.tolist() == [hits, 0, 0, 0, 0]
    torch.testing.assert_close(out.loss_sums[0] / count, out.loss.detach().to(out.loss_sums.dtype))


# --- equalities ---------------------------------------------------------------------------------


def test_noise_is_for_training_and_follows_the_seed():
    documents = padded_batch(documents_of())
    module = make_module(make_draft(), feature_noise=0.5)
    first, again, other = (module(**documents, seed=seed).loss for seed in (1, 1, 2))
    assert first == again != other
    module.eval()
    quiet = module(**documents, seed=1)
    module.feature_noise = 0.0
    assert module(**documents, seed=2).loss == quiet.loss
    assert (quiet.charged > 0).all()  # in eval mode the rollout is followed as in serving


def test_the_noise_is_uniform():
    words = slot_words(Documents(*(np.arange(4096) for _ in range(3))), 5)
    noise = uniform_noise(torch.from_numpy(words.view(np.int64)), 64, 0.1)
    assert noise.min() >= -0.1
    assert noise.max() < 0.1
    shares = torch.histc(noise, 20, -0.1, 0.1) / noise.numel()
    assert (shares - 0.05).abs().max() < 0.002
    correlation = torch.corrcoef(noise.T) - torch.eye(64)
    assert correlation.abs().max() < 0.08  # 4.9 standard deviations of 4,096 rows


def test_logits_cannot_supervise_a_regression():
    batch = padded_batch(documents_of())
    hidden = batch.pop("target_last_hidden_states")
    module = make_module(make_draft())
    with pytest.raises(ValueError, match="hidden supervision"):
        module(**batch, target_logits=hidden @ module.draft_model.lm_head.weight.T)


def test_a_head_that_is_not_the_targets_is_refused():
    """Also after loading; a head that was rounded or tuned since passes."""
    draft, vocabulary = make_draft(), {"selected_token_ids": torch.arange(V)}
    vocabulary["selected_token_mask"] = torch.ones(V, dtype=torch.bool)
    head = torch.nn.Linear(D, V, bias=False)
    with pytest.raises(ValueError, match="copy_head_from_target"):
        Eagle1TrainerModule(draft, **vocabulary, target_head=head)
    draft.copy_head_from_target(head)
    Eagle1TrainerModule(draft, **vocabulary, target_head=head)
    for precision in (torch.bfloat16, torch.float16, torch.float32):
        loaded = make_draft().to(precision)
        loaded.load_state_dict(draft.state_dict())
        Eagle1TrainerModule(loaded, **vocabulary, target_head=head)
