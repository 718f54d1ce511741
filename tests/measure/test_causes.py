"""Rejections by cause: the shares sum to the loss, and each rejection is charged once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.decode.accept import Round, walk_rounds
from fledge.measure.figures import CAUSES, Sample, acceptance, failures


@st.composite
def measured(draw):
    """(samples, K, tokens in the draft vocabulary): any rounds through any texts, in which no token
    outside the draft vocabulary is accepted."""
    depth = draw(st.integers(1, 5))
    vocabulary = draw(st.sets(st.integers(0, 9)))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        answer = draw(st.lists(st.integers(0, 9), max_size=12))
        text, accepted = [*prompt, *answer], []
        for slot in range(len(text)):
            inside = [token in vocabulary for token in text[slot + 2 : slot + 2 + depth]]
            most = inside.index(False) if False in inside else len(inside)
            accepted.append(draw(st.integers(0, most)))
        rounds = walk_rounds(accepted, prompt=len(prompt), total=len(text))
        samples.append(Sample(prompt, answer, rounds))
    return samples, depth, vocabulary


@given(measured(), st.integers(0, 12))
def test_the_shares_sum_to_the_loss(case, long_context):
    samples, depth, vocabulary = case
    losses = failures(samples, depth, vocabulary.__contains__, long_context=long_context)
    total = acceptance(samples, depth)
    assert losses.lost == total.rounds * (depth + 1) - total.emitted
    if total.rounds:
        assert losses.lost_length == pytest.approx(depth + 1 - total.length)
    values = losses.to_json()
    shares = [c["share"] for c in values["causes"].values()] + [values["end_of_text"]["share"]]
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1.0 if losses.lost else 0.0)
    # each rejection is charged once, each compared token is counted once
    blames = losses.blames.values()
    misses = [
        [*s.prompt_ids, *s.answer_ids][r.context + r.accepted]
        for s in samples
        for r in s.rounds
        if r.accepted < min(depth, len(s) - r.context)
    ]
    assert sum(blame.rejected for blame in blames) == len(misses)
    accepted = sum(r.accepted for s in samples for r in s.rounds)
    assert sum(blame.judged for blame in blames) == accepted + len(misses)
    # the vocabulary is charged exactly where the token is outside the draft vocabulary
    outside = losses.blames["vocabulary"]
    assert outside.judged == outside.rejected == sum(t not in vocabulary for t in misses)


@given(st.integers(1, 4), st.integers(1, 20))
def test_rounds_without_a_rejection_charge_nothing(depth, tokens):
    rounds = walk_rounds([depth] * (3 + tokens), prompt=3, total=3 + tokens)
    losses = failures([Sample([0] * 3, [1] * tokens, rounds)], depth, bool)
    assert all(blame.lost == blame.rejected == 0 for blame in losses.blames.values())
    assert losses.lost == losses.ended
    assert losses.largest is None


def test_the_first_matching_cause_is_charged():
    """Four drafted tokens, a text of 90. Order of causes: a token outside the vocabulary, the
    context length, the depth."""
    prompt, answer = [0] * 40, [1] * 50

    def charged(accepted, *, said=True, context=41, long_context=100):
        sample = Sample(prompt, answer, [Round(context, accepted, accepted + 1)])
        losses = failures([sample], 4, lambda _: said, long_context=long_context)
        [(name, blame)] = [(n, b) for n, b in losses.blames.items() if b.rejected]
        assert blame.lost == 5 - (accepted + 1)
        assert losses.largest == name or blame.lost == 0
        assert CAUSES[name].remedy in losses.remedy or blame.lost == 0
        return name

    assert charged(0, said=False, long_context=0) == "vocabulary"
    assert charged(3, long_context=40) == "context"
    assert charged(3, long_context=41) == "depth"
    assert charged(2) == "depth"  # the third of four
    assert charged(1) == "rest"
    assert list(CAUSES) == ["vocabulary", "context", "depth", "rest"]
