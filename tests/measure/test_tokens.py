"""Which model wrote which token: the report's colors, and the probabilities behind them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.tiny_decode import AUX, SPARK, STOPS, make_block
from fledge.decode.accept import Round
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Pieces
from fledge.decode.strategy import rollouts_of
from fledge.measure.figures import Sample
from fledge.measure.replay import look_closely, written_tokens
from fledge.models.resolve import load_tokenizer
from fledge.target.hf.model import HFEagle3TargetModel


class Numbers:
    """A tokenizer that decodes ids as numbers in brackets."""

    def decode(self, ids, **_):
        return "".join(f"[{i}]" for i in ids)


@pytest.mark.parametrize("kind", ["trained", "parallel"])
def test_every_token_has_its_author_and_both_models_probabilities(target, drafts, asked, kind):
    """Compared with a plain pass of the target and with the rounds of live decoding."""
    draft, depth = drafts[kind], 4
    live = SpeculativeDecoder(target, draft, aux_layer_ids=AUX, num_draft_tokens=depth)
    backend = HFEagle3TargetModel(target, AUX, supervision="hidden")
    seen = set()
    for generation in live.generate(asked[:12], STOPS):
        if not generation.rounds:
            continue
        text = Sample(generation.prompt_ids, generation.token_ids, generation.rounds)
        tokens = look_closely(backend, rollouts_of(draft, depth), text, Numbers())
        assert "".join(t.text for t in tokens) == Numbers().decode(generation.token_ids)
        ids = generation.prompt_ids + generation.token_ids
        with torch.no_grad():
            probs = target(torch.tensor([ids])).logits[0].softmax(-1)
        for index, token in enumerate(tokens):
            position = len(generation.prompt_ids) + index
            if position >= 2:
                assert token.target_p == pytest.approx(
                    float(probs[position - 1, ids[position]]), abs=1e-5
                )
            if index == 0:
                assert (token.depth, token.round, token.draft_p) == (0, -1, None)
                continue
            round_ = generation.rounds[token.round]
            k = position - round_.context
            assert token.depth == (k + 1 if k < round_.accepted else 0)
            if token.depth:
                assert token.instead is None
                assert 0 < token.draft_p <= 1
            elif k < depth:  # the draft proposed a different token
                assert token.instead != token.text
                assert token.instead_p >= token.draft_p
            else:
                assert token.draft_p is token.instead is None
            seen.add(token.depth)
    assert {0, 1, 2} <= seen


def test_where_a_draft_stops_early_it_proposes_no_token(target, asked):
    """Below its threshold DSpark proposes nothing: no token, and no probability that is not one."""
    draft = make_block(target, fit=30, **SPARK, confidence_threshold=0.9)
    live = SpeculativeDecoder(target, draft, aux_layer_ids=AUX, num_draft_tokens=4)
    backend, shown = HFEagle3TargetModel(target, AUX, supervision="hidden"), []
    for generation in live.generate(asked[:12], STOPS):
        text = Sample(generation.prompt_ids, generation.token_ids, generation.rounds)
        shown += look_closely(backend, rollouts_of(draft, 4), text, Numbers())
    proposed = [token.instead_p for token in shown if token.instead is not None]
    assert 0 < len(proposed) < sum(token.depth == 0 and token.round >= 0 for token in shown)
    assert all(0 <= p <= 1 for p in proposed)


def test_the_draft_probability_comes_from_the_drafts_own_distribution(target, drafts):
    """At depth 0, a chain's logits follow from one unrolled state."""
    draft = drafts["trained"]
    live = SpeculativeDecoder(target, draft, aux_layer_ids=AUX, num_draft_tokens=1)
    [generation] = live.generate([[5, 6, 7]], STOPS)
    backend = HFEagle3TargetModel(target, AUX, supervision="hidden")
    text = Sample(generation.prompt_ids, generation.token_ids, generation.rounds)
    tokens = look_closely(backend, rollouts_of(draft, 1), text, Numbers())
    first = generation.rounds[0]
    ids = (generation.prompt_ids + generation.token_ids)[: first.context]
    ones = torch.ones(1, len(ids), dtype=torch.long)
    batch = backend.generate_batch(torch.tensor([ids]), ones, ones)
    from fledge.rollout.plan import plan_rollout
    from fledge.rollout.slots import RowMasks

    with torch.no_grad():
        mask = torch.zeros(1, len(ids), dtype=torch.long)
        mask[0, len(ids) - 2] = 1
        plan = plan_rollout(RowMasks(mask, ones), num_depths=1)
        [state] = draft.unroll(batch.aux_hidden_states[0][: len(ids) - 1],
                               batch.input_ids[0][: len(ids) - 1], plan)  # fmt: skip
        probs = torch.softmax(draft.lm_head(state)[0].float(), -1)
    token_id = (generation.prompt_ids + generation.token_ids)[first.context]
    place = (draft.selected_token_ids == token_id).nonzero()
    expected = float(probs[place[0, 0]]) if len(place) else 0.0
    assert tokens[1].draft_p == pytest.approx(expected, abs=1e-5)


def test_the_worked_example_of_rounds():
    # Prompt of 2, then 0 (from the prompt's pass), round 1: 1 2 drafted, 3 the target's, round 2: 4
    rounds = [Round(context=3, accepted=2, emitted=3), Round(context=6, accepted=0, emitted=1)]
    tokens = written_tokens(Sample([7, 7], [0, 1, 2, 3, 4], rounds), Numbers())
    assert [(t.text, t.depth, t.round) for t in tokens] == [
        ("[0]", 0, -1), ("[1]", 1, 0), ("[2]", 2, 0), ("[3]", 0, 0), ("[4]", 0, 1),
    ]  # fmt: skip
    assert tokens[1].to_json() == ["[1]", 1, 0, None, None, None, None]


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_concatenate_to_the_text(tiny_target, text):
    tokenizer = load_tokenizer(str(tiny_target))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = Pieces(tokenizer)
    shown = pieces.add(ids[: len(ids) // 2]) + pieces.add(ids[len(ids) // 2 :])
    assert len(shown) == len(ids)
    assert "".join(shown) + pieces.rest() == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in shown if "\ufffd" not in text)


def test_a_character_split_across_tokens_belongs_to_the_last_one(tiny_target):
    tokenizer = load_tokenizer(str(tiny_target))
    ids = tokenizer("a\u1e9eb", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    assert Pieces(tokenizer).add(ids) == ["a", "", "", "\u1e9e", "b"]
    cut = Pieces(tokenizer)
    assert cut.add(ids[:2]) == ["a", ""]
    assert cut.rest() == "\ufffd"
