"""NaN is never accepted and never ends up in a text; a target that computes NaN is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.test_speculative import decoder
from decode.tiny_decode import STOPS, make_draft, make_target
from fledge.core.head import NO_TOKEN, likeliest
from fledge.decode.accept import Chooser, Proposal, judge, judge_drawn, pack_picks, walk
from fledge.methods.registry import METHODS
from fledge.target.finite_check import NotFinite

BAD = [float("nan"), float("inf")]


@given(st.integers(0, 4), st.integers(0, 7), st.sampled_from([*BAD, float("-inf")]))
@settings(deadline=None, max_examples=40)
def test_the_likeliest_of_non_finite_logits_is_no_token(row, place, value):
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(row))
    expected = logits.argmax(-1)
    logits[row, place] = value
    if value > 0 or value != value:
        expected[row] = NO_TOKEN
    else:
        expected = logits.argmax(-1)  # minus infinity only excludes a token
    assert torch.equal(likeliest(logits), expected)
    assert torch.equal(Chooser().pick_sound(logits), expected)


def test_the_no_token_marker_is_never_accepted():
    assert walk([NO_TOKEN, 4], [-1, 0], [NO_TOKEN, 4, 4]).path == []
    assert walk([3, NO_TOKEN], [-1, 0], [3, NO_TOKEN, 5]).path == [0]


@pytest.mark.parametrize("value", BAD)
def test_nothing_is_accepted_where_the_target_is_not_finite(value):
    """argmax over NaN is token 0, for the target's logits and the draft's alike."""
    logits = torch.randn(1, 4, 6)
    token_BN = logits.argmax(-1)[:, :3]
    whole = judge(pack_picks(Proposal(token_BN), logits, Chooser()).tolist(), 3)
    assert whole[0].path == [0, 1, 2]
    logits[0, 1] = value
    for proposed in (token_BN, torch.zeros_like(token_BN)):
        proposed[0, 0] = token_BN[0, 0]
        [verdict] = judge(pack_picks(Proposal(proposed), logits, Chooser()).tolist(), 3)
        assert (verdict.path, verdict.tokens[-1]) == ([0], NO_TOKEN)


@pytest.mark.parametrize("value", BAD)
def test_a_drawn_chain_ends_where_the_target_is_not_finite(value):
    chooser = Chooser(1.0, torch.Generator().manual_seed(0))
    probs_BNW = torch.full((2, 3, 6), 1 / 6)
    logits = torch.zeros(2, 4, 6)  # p = q: everything is accepted
    logits[1, 2, 3] = value
    proposal = Proposal(torch.tensor([[0, 1, 2], [3, 4, 5]]), probs_BNW=probs_BNW)
    sound, broken = judge_drawn(proposal, logits, chooser, torch.arange(6))
    assert sound.tokens[:3] == [0, 1, 2]
    assert broken.tokens == [3, 4, NO_TOKEN]


def with_nan(model, name):
    model.get_parameter(name).data[0, 0] = float("nan")
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", [None, "chain", "tree"])
def test_a_target_that_computes_nan_is_refused(drafts, method, temperature):
    model = with_nan(make_target(), "model.layers.1.self_attn.v_proj.weight")
    speculative = decoder(model, drafts["trained"] if method else None, method=method)
    with pytest.raises(NotFinite, match="or the weights are damaged"):
        speculative.generate([[1, 2], [3]], STOPS, temperature=temperature)


@pytest.mark.parametrize("method", [None, "chain", "tree"])
def test_the_error_names_the_row_and_token_that_overflowed(drafts, asked, answers, method):
    """One token's embedding makes the target overflow: texts are fine until they reach it."""
    row, (text, _) = next((i, a) for i, a in enumerate(answers[:20]) if len(set(a[0])) > 4)
    token = next(t for t in text[2:] if t not in text[:2] and t not in asked[row])
    model = make_target()
    model.model.embed_tokens.weight.data[token] = 1e200
    speculative = decoder(model, drafts["trained"] if method else None, method=method)
    sound = next(i for i, a in enumerate(answers) if token not in (*a[0], *asked[i]))
    position = len(asked[row]) + text.index(token)
    token_at = position if method is None else r"\d+"  # or as soon as a draft proposes it
    expected = rf"not finite in logits, row 1, token {token_at}: its numbers overflow even"
    with pytest.raises(NotFinite, match=expected):
        speculative.generate([asked[sound], asked[row]], STOPS)
    [alone] = speculative.generate([asked[sound]], STOPS)
    assert alone.token_ids == answers[sound][0]


@pytest.mark.parametrize("kind", [*METHODS["eagle3"].strategies, "parallel"])
def test_a_draft_that_computes_nan_is_never_accepted_and_does_no_harm(target, asked, answers, kind):
    draft = make_draft(target, layers=1, parallel=kind == "parallel")
    draft.lm_head.weight.data.fill_(float("nan"))
    speculative = decoder(target, draft, method=kind)
    texts = speculative.generate(asked[:12], STOPS)
    assert [text.token_ids for text in texts] == [answer for answer, _ in answers[:12]]
    assert {r.accepted for text in texts for r in text.rounds} == {0}
    drawn = speculative.generate(asked[:3], STOPS, temperature=0.7)
    assert all(0 <= token < 40 for text in drawn for token in text.token_ids)
