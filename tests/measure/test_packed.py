"""Replay on packs: several answers in a document, several documents in a pack, every encoding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.tiny_decode import AUX, STOPS, plain_greedy
from fledge.core.rows import TokenRow
from fledge.data.pack import collate, pack_rows
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategy import drafting_slots, rollouts_of
from fledge.measure.figures import Acceptance, count_rounds
from fledge.measure.replay import (
    accepted_lengths,
    answers_of,
    drafted_tokens,
    replay_held_out,
    target_picks,
)
from fledge.methods.peagle.decoding import run_lengths
from fledge.target.hf.model import HFEagle3TargetModel


def conversations(target, draft, asked, depth):
    """Conversations of two answers as token rows, and the acceptance of their live rounds."""
    live = SpeculativeDecoder(target, draft, aux_layer_ids=AUX, num_draft_tokens=depth)
    first = live.generate(asked, STOPS)
    answered = [answer.prompt_ids + answer.token_ids for answer in first]
    second = live.generate([[*ids, 7, 5] for ids in answered], STOPS)
    rows, pairs = [], []
    for answer_1, answer_2 in zip(first, second, strict=True):
        text = answer_2.prompt_ids + answer_2.token_ids
        mask = np.zeros(len(text), dtype=np.uint8)
        mask[len(answer_1.prompt_ids) : len(answer_1.prompt_ids) + len(answer_1.token_ids)] = 1
        mask[len(answer_2.prompt_ids) :] = 1
        rows.append(TokenRow(np.array(text, dtype=np.int32), mask, "", truncated=False))
        for answered in (answer_1, answer_2):
            total = len(answered.prompt_ids) + len(answered.token_ids)
            pairs += [(round_, total) for round_ in answered.rounds]
    return rows, count_rounds(pairs, depth)


def packs_of(rows, width):
    packing = pack_rows([len(row.input_ids) for row in rows], width)
    return [collate(rows, [pack], width, pad_id=0) for pack in packing.packs]


@pytest.mark.parametrize("width", [60, 300])
@pytest.mark.parametrize("kind", ["random", "trained", "deep", "parallel"])
def test_held_out_rounds_match_live_rounds(target, drafts, asked, kind, width):
    depth = 4
    rows, expected = conversations(target, drafts[kind], asked[:24], depth)
    backend = HFEagle3TargetModel(target, AUX, supervision="hidden")
    rollouts = rollouts_of(drafts[kind], depth)
    measured = Acceptance.none(depth)
    for tokens in packs_of(rows, width):
        batch = backend.generate_batch(*tokens.arguments())
        picks = target_picks(batch, tokens, backend.info().head, drafts[kind].selected_token_ids)
        measured += replay_held_out(batch, tokens, rollouts, picks)
    assert measured == expected
    assert measured.rounds > 100


def test_every_supervision_gives_the_same_rounds(target, drafts, asked):
    draft = drafts["trained"]
    rows, expected = conversations(target, draft, asked[:12], 3)
    [tokens] = packs_of(rows, 600)
    ids = draft.selected_token_ids
    member = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    member[ids] = True
    for supervision in ("logits", "probs", "hidden"):
        backend = HFEagle3TargetModel(target, AUX, supervision=supervision)
        backend.set_vocab_mapping(ids, member)
        batch = backend.generate_batch(*tokens.arguments())
        picks = target_picks(batch, tokens, backend.info().head, ids)
        measured = replay_held_out(batch, tokens, rollouts_of(draft, 3), picks)
        assert measured == expected, supervision
        if supervision == "logits":
            likeliest = picks
        elif supervision == "probs":  # tokens outside the draft vocabulary are only known as such
            outside = ~np.isin(likeliest, ids)
            assert outside.sum() > (likeliest == -1).sum()
            assert (picks == np.where(outside, -1, likeliest)).all()
        else:
            assert (picks == likeliest).all()


def test_on_foreign_text_a_hit_is_what_the_target_would_pick(target, drafts, asked):
    """On a text that the target would not write, the draft is judged by the target's picks, and
    never past a position where the text departs from them."""
    draft, depth = drafts["trained"], 3
    rng = np.random.default_rng(0)
    text = rng.integers(4, 40, 60).astype(np.int32)
    text[20:34] = plain_greedy(target, text[:20].tolist(), Stops(14))[0]  # a stretch of its own
    row = TokenRow(text, (np.arange(60) >= 5).astype(np.uint8), "", truncated=False)
    [tokens] = packs_of([row], 60)
    backend = HFEagle3TargetModel(target, AUX, supervision="hidden")
    batch = backend.generate_batch(*tokens.arguments())
    picks = target_picks(batch, tokens, backend.info().head, draft.selected_token_ids)
    with torch.no_grad():
        likeliest = target(torch.tensor(text[None]).long()).logits[0].argmax(-1).numpy()
    assert (picks[4:58] == likeliest[5:59]).all()
    assert (picks[:4] == -1).all()
    assert (picks[58:] == -1).all()
    rollouts = rollouts_of(draft, depth)
    accepted = accepted_lengths(rollouts, batch, tokens, picks)[0]
    plan = rollouts.plan(tokens)
    with torch.no_grad():
        tokens_by_depth = [
            drafted_tokens(rollouts, states) for states in rollouts.head_inputs(batch, plan)
        ]
    drafted = {
        (int(plan.slot_T[slot]), k): int(token)
        for k, (rows, tokens_N) in enumerate(zip(plan.depths, tokens_by_depth, strict=True))
        for slot, token in zip(rows.slot_N, tokens_N, strict=True)
    }
    for slot in range(4, 58):
        count = 0
        while count < depth and drafted.get((slot, count)) == likeliest[slot + count + 1]:
            count += 1
            if likeliest[slot + count] != text[slot + count + 1]:
                break
        assert accepted[slot] == count
    assert accepted.max() >= 1


def test_the_slots_of_the_worked_example():
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0], dtype=np.uint8)
    row = TokenRow(np.arange(9, dtype=np.int32), mask, "", truncated=False)
    [tokens] = packs_of([row], 9)
    assert drafting_slots(tokens)[0].nonzero()[:, 0].tolist() == [2, 3, 4]
    [answer] = answers_of(tokens)
    assert (answer.prompt, answer.total, answer.slots) == (3, 7, slice(0, 7))


def test_no_slot_drafts_a_token_of_the_next_document():
    ones = np.ones(3, dtype=np.uint8)  # without prompts, nothing else separates the two answers
    rows = [TokenRow(np.arange(3, dtype=np.int32), ones, "", truncated=False) for _ in range(2)]
    [tokens] = packs_of(rows, 6)
    assert drafting_slots(tokens)[0].tolist() == [True, False, False] * 2


def test_an_answer_without_a_prompt_has_no_rounds():
    ones = np.ones(4, dtype=np.uint8)
    [tokens] = packs_of([TokenRow(np.arange(4, dtype=np.int32), ones, "", truncated=False)], 6)
    assert list(answers_of(tokens)) == []


@given(st.lists(st.booleans(), max_size=30))
@settings(max_examples=60, deadline=None)
def test_run_lengths_count_to_the_next_gap(marked):
    lengths = run_lengths(np.array(marked, dtype=bool)).tolist()
    for start, length in enumerate(lengths):
        assert all(marked[start : start + length])
        assert start + length == len(marked) or not marked[start + length]
