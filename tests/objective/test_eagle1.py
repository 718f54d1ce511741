"""EAGLE-1's objective against a textbook version, and the equalities every objective satisfies."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_eagle3 import _norm, _rope, make_documents, packed_batch, padded_batch
from torch.nn import functional as F
from transformers import LlamaConfig

from fledge.core.head import TargetHead
from fledge.draft.eagle1 import LlamaEagle1DraftModel
from fledge.objective.eagle1 import Eagle1TrainerModule
from fledge.rollout.cod import Documents, slot_words
from fledge.rollout.noise import uniform_noise

V, D = 31, 10  # the sizes of the documents of `naive_eagle3`
LENGTHS = [9, 1, 6, 13, 2]
SEED = 11


def make_draft(*, layers=1, fc_bias=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=20, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=64,
        eagle_version=1, num_aux_hidden_states=1, fc_bias=fc_bias,
    )  # fmt: skip
    draft = LlamaEagle1DraftModel(config).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return draft


def make_module(draft, **options):
    """The target head is the draft's copy of it."""
    return Eagle1TrainerModule(
        draft,
        selected_token_ids=torch.arange(V),
        selected_token_mask=torch.ones(V, dtype=torch.bool),
        target_head=TargetHead(draft.lm_head.weight.detach()),
        **options,
    )


def documents_of(lengths=LENGTHS, seed=3):
    """A token's only aux state is its last hidden state."""
    documents = make_documents(lengths, seed=seed)
    for document in documents:
        document.aux = document.hidden
    return documents


def run(module, batch, **extra):
    module.zero_grad()
    out = module(**batch, **extra)
    out.loss.backward()
    trained = {name: p for name, p in module.draft_model.named_parameters() if p.requires_grad}
    return out, {name: p.grad.clone() for name, p in trained.items()}


def assert_same(first, second, tolerance=1e-11):
    (out_a, grads_a), (out_b, grads_b) = first, second
    torch.testing.assert_close(out_a.loss, out_b.loss, rtol=tolerance, atol=tolerance)
    assert grads_a.keys() == grads_b.keys()
    for name in grads_a:
        torch.testing.assert_close(grads_a[name], grads_b[name], rtol=tolerance, atol=tolerance)
    for field in ("charged", "correct", "step_valid", "step_prefix_hits"):
        assert getattr(out_a, field).tolist() == getattr(out_b, field).tolist(), field


# --- the textbook -------------------------------------------------------------------------------


def naive_states(draft, document, features):
    """The draft's states [T, D] for one document, with all concatenations written out."""
    config, p = draft.config, dict(draft.named_parameters())
    embedding = p["embed_tokens.weight"][F.pad(document.ids[1:], (0, 1))]
    state = F.linear(torch.cat([embedding, features], -1), p["fc.weight"], p.get("fc.bias"))
    heads, groups, size = 2, 1, 4
    for i in range(config.num_hidden_layers):
        weights = {n.removeprefix(f"layers.{i}."): w for n, w in p.items() if f"layers.{i}." in n}
        x = state
        if i > 0:
            x = _norm(x, weights["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (x @ weights[f"self_attn.{n}_proj.weight"].T).view(len(x), -1, size) for n in "qkv"
        )
        position = torch.arange(len(x))
        q, k = (_rope(x.transpose(0, 1), position, draft.rotary).transpose(0, 1) for x in (q, k))
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q, k) / size**0.5
        scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
        out = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v).flatten(1)
        state = state + out @ weights["self_attn.o_proj.weight"].T
        x = _norm(state, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (x @ weights[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        state = state + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
    return state


def naive_noise(document, seed, bound):
    """splitmix64 written out, one word at a time."""
    wrap = 2**64 - 1

    def mix(word):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & wrap
        return word ^ (word >> 31)

    supervised = F.pad(document.loss[1:], (0, 1)).bool().numpy()
    place = np.arange(len(supervised))
    words = slot_words(Documents(supervised, np.zeros_like(place), place), seed)
    golden = 0x9E3779B97F4A7C15
    rows = [
        [(mix((int(word) + golden * (c + 1)) & wrap) >> 40) / 2**24 for c in range(D)]
        for word in words
    ]
    return (2 * torch.tensor(rows, dtype=torch.float64) - 1) * bound


def naive_eagle1(draft, documents, *, noise=0.0, feature_weight=1.0, token_weight=0.1):
    head, regression, entropy, hits, count = draft.lm_head.weight.detach(), 0.0, 0.0, 0, 0
    for document in documents:
        features = document.hidden
        if noise:
            features = features + naive_noise(document, SEED, noise)
        states = naive_states(draft, document, features)
        for t in range(len(document.ids) - 1):
            if not document.loss[t + 1]:
                continue
            target_state, count = document.hidden[t + 1], count + 1
            difference = (states[t] - target_state).abs()
            smooth = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5)
            regression = regression + smooth.mean()
            logits, target_logits = head @ states[t], head @ target_state
            probs = target_logits.softmax(-1, dtype=torch.float32)  # as in every method
            entropy = entropy - (probs * logits.log_softmax(-1)).sum()
            hits += int(logits.argmax() == target_logits.argmax())
    return (feature_weight * regression + token_weight * entropy) / count, count, hits


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


def test_head_and_embeddings_are_not_trained():
    module = make_module(make_draft())
    _, gradients = run(module, padded_batch(documents_of()), seed=SEED)
    assert not {"lm_head.weight", "embed_tokens.weight"} & gradients.keys()
    assert all(gradient.any() for gradient in gradients.values())


# --- equalities ---------------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 5), st.integers(0, 99))
def test_packed_equals_padded(lengths, spare, seed):
    documents = documents_of(lengths, seed=seed)
    if not any(document.loss[1:].any() for document in documents):
        return
    module = make_module(make_draft())
    packed = packed_batch([documents], sum(lengths) + spare)
    assert_same(
        run(module, padded_batch(documents), seed=SEED), run(module, packed, seed=SEED), 1e-9
    )


def test_micro_batches_add_up():
    documents = documents_of()
    module = make_module(make_draft())
    whole, gradients = run(module, padded_batch(documents), seed=SEED)
    parts = [padded_batch([document]) for document in documents]
    outs = [run(module, part, seed=SEED, normalizer=whole.charged) for part in parts]
    torch.testing.assert_close(sum(out.loss for out, _ in outs), whole.loss)
    for name, gradient in gradients.items():
        total = sum(grads[name] for _, grads in outs)
        torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10)


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
