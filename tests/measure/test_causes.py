"""Rejections by cause: the shares sum to the loss, and each rejection is charged once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.decode.rounds import Round, walk_rounds
from fledge.measure.causes import CAUSES, failures, kinds_of
from fledge.measure.figures import Sample, acceptance, vocabulary_misses

KINDS = ["", "code", "scripts", "digits", "punctuation"]


@st.composite
def measured(draw):
    """(samples, K, tokens that the draft can say, kinds by token): any rounds through any texts, in
    which nothing is accepted that the draft cannot say."""
    depth = draw(st.integers(1, 5))
    sayable = draw(st.sets(st.integers(0, 9)))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=10, max_size=10))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        answer = draw(st.lists(st.integers(0, 9), max_size=12))
        text, accepted = [*prompt, *answer], []
        for slot in range(len(text)):
            said = [token in sayable for token in text[slot + 2 : slot + 2 + depth]]
            first = said.index(False) if False in said else len(said)
            accepted.append(draw(st.integers(0, first)))
        rounds = walk_rounds(accepted, prompt=len(prompt), total=len(text))
        samples.append(Sample(prompt, answer, rounds))
    return samples, depth, sayable, kinds


@given(measured(), st.integers(0, 12))
def test_the_shares_sum_to_the_loss(case, long_context):
    samples, depth, sayable, kinds = case
    found = failures(
        samples, depth, sayable.__contains__, lambda ids: [kinds[i] for i in ids],
        long_context=long_context,
    )  # fmt: skip
    whole = acceptance(samples, depth)
    assert found.lost == whole.rounds * (depth + 1) - whole.emitted
    if whole.rounds:
        assert found.lost_length == pytest.approx(depth + 1 - whole.length)
    told = found.to_json()
    shares = [one["share"] for one in told["causes"].values()] + [told["end_of_text"]["share"]]
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1.0 if found.lost else 0.0)
    # each rejection once, each compared token once
    blames = found.blames.values()
    misses = [r for s in samples for r in s.rounds if r.accepted < min(depth, s.total - r.context)]
    assert sum(blame.rejected for blame in blames) == len(misses)
    accepted = sum(r.accepted for s in samples for r in s.rounds)
    assert sum(blame.judged for blame in blames) == accepted + len(misses)
    # the vocabulary is to blame exactly where the draft could not say the token
    outside = found.blames["vocabulary"]
    ended = vocabulary_misses(samples, depth, sayable.__contains__).ended_rounds
    assert outside.judged == outside.rejected == ended


@given(st.integers(1, 4), st.integers(1, 20))
def test_rounds_without_a_rejection_charge_nothing(depth, tokens):
    rounds = walk_rounds([depth] * (3 + tokens), prompt=3, total=3 + tokens)
    found = failures([Sample([0] * 3, [1] * tokens, rounds)], depth, bool, lambda ids: [""] * 20)
    assert all(blame.lost == blame.rejected == 0 for blame in found.blames.values())
    assert found.lost == found.ended
    assert found.largest is None


def test_the_first_cause_that_holds_is_charged():
    """Four drafted tokens, a text of 90: a token that cannot be said, then what stands before it,
    then the context, then the place."""
    prompt, answer = [0] * 40, [1] * 50

    def charged(accepted, *, said=True, kind="", context=41, long_context=100):
        sample = Sample(prompt, answer, [Round(context, accepted, accepted + 1)])
        found = failures(
            [sample], 4, lambda _: said, lambda ids: [kind] * len(ids), long_context=long_context
        )
        [(name, blame)] = [(n, b) for n, b in found.blames.items() if b.rejected]
        assert blame.lost == 5 - (accepted + 1)
        assert found.largest == name or blame.lost == 0
        assert CAUSES[name].remedy in found.remedy or blame.lost == 0
        return name

    assert charged(0, said=False, kind="code", long_context=0) == "vocabulary"
    assert charged(0, kind="digits", long_context=0) == "digits"
    assert charged(3, long_context=40) == "context"
    assert charged(3, long_context=41) == "depth"
    assert charged(2) == "depth"  # the third of four
    assert charged(1) == "rest"
    assert list(CAUSES) == [
        *("vocabulary", "code", "scripts", "digits", "punctuation", "context", "depth", "rest")
    ]


def test_what_a_token_is_to_the_one_behind_it(smollm2_tokenizer):
    def kinds(text):
        ids = smollm2_tokenizer(text)["input_ids"]
        return kinds_of(ids, smollm2_tokenizer)

    # In _ 1 2 , _ ét é . NEWLINE: a space is what stands before it
    assert kinds("In 12, été.\n") == [
        *("", "", "digits", "digits", "punctuation", "punctuation", "", "", "punctuation"),
        "punctuation",
    ]
    assert set(kinds("你好мир")) == {"scripts"}
    assert kinds("a[0]") == ["", "code", "digits", "code"]
    # see : NEWLINE ``` NEWLINE x is one NEWLINE ``` NEWLINE so it is
    fenced = kinds("see:\n```\nx is one\n```\nso it is")
    assert fenced == ["", *["punctuation"] * 2, *["code"] * 7, "punctuation", "", "", ""]
    end = smollm2_tokenizer.eos_token_id
    assert kinds_of([end], smollm2_tokenizer) == [""]
