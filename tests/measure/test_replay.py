"""Replay == live decoding, round by round, and for a round started at any slot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from decode.tiny_decode import AUX
from fledge.decode.accept import Round, walk_rounds
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.measure.replay import Text, packs_of, replay
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.target.hf.model import HFEagle3TargetModel


@pytest.fixture(scope="module")
def backend(target):
    return HFEagle3TargetModel(target, AUX, supervision="hidden")


@pytest.mark.parametrize("kind", ["trained", "parallel"])
def test_every_slot_has_the_accepted_length_of_a_round_started_there(
    target, backend, drafts, asked, kind
):
    depth = 3
    live = SpeculativeDecoder(target, drafts[kind], aux_layer_ids=AUX, num_draft_tokens=depth)
    [whole] = live.generate(asked[:1], Stops(20))
    [replayed] = replay(backend, drafts[kind], [Text(whole.prompt_ids, whole.token_ids)],
                     num_draft_tokens=depth)  # fmt: skip
    text = whole.prompt_ids + whole.token_ids
    assert not any(replayed.accepted_T[: len(whole.prompt_ids) - 1])  # no round starts there
    for slot in range(len(whole.prompt_ids) - 1, len(text) - 2):
        [generation] = live.generate([text[: slot + 1]], Stops(depth + 2))
        assert replayed.accepted_T[slot] == min(generation.rounds[0].accepted, len(text) - slot - 2)


def test_a_real_model_gives_the_same_output_with_and_without_a_draft(shared_data):
    """TinyStories' 260k-parameter Llama in fp64, with an untrained draft."""
    backend = HFEagle3TargetModel.from_pretrained(
        shared_data / "models/stories260K", aux_layer_ids=[0, 2, 4], supervision="hidden",
        dtype=torch.float64, device="cpu",
    )  # fmt: skip
    torch.manual_seed(0)
    draft = LlamaEagle3DraftModel(draft_config(backend.model.config)).double()
    draft.copy_embeddings_from_target(backend.get_input_embeddings())
    draft.copy_head_from_target(backend.model.lm_head)
    prompts = [backend.tokenizer(text)["input_ids"] for text in ("Once upon", "Lily and Tom", "A")]
    stops = Stops(40, eos_token_ids(backend.model, backend.tokenizer))
    plain = SpeculativeDecoder(backend.model).generate(prompts, stops)
    live = SpeculativeDecoder(backend.model, draft, aux_layer_ids=[0, 2, 4], num_draft_tokens=3)
    generations = live.generate(prompts, stops)
    assert [text.token_ids for text in generations] == [text.token_ids for text in plain]
    assert "a time, there was a little girl" in backend.tokenizer.decode(plain[0].token_ids)
    texts = [Text(text.prompt_ids, text.token_ids) for text in generations]
    replayed = replay(backend, draft, texts, num_draft_tokens=3)
    assert [text.rounds for text in replayed] == [text.rounds for text in generations]


def draft_config(config):
    return LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, rms_norm_eps=config.rms_norm_eps,
    )  # fmt: skip


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_packs_hold_every_text_once_and_whole(lengths, batch_tokens):
    packs = list(packs_of(lengths, batch_tokens))
    pieces = [piece for pack in packs for piece in pack]
    assert sorted(piece.row for piece in pieces) == list(range(len(lengths)))
    assert all(piece.length == lengths[piece.row] for piece in pieces)
    for pack in packs:
        assert len(pack) == 1 or sum(map(len, pack)) <= max(batch_tokens, *lengths)


def test_short_texts_have_no_rounds_to_replay(backend, drafts):
    texts = [Text([1, 2], []), Text([4], [5]), Text([1, 2, 3], [7, 8])]
    for kind in ("trained", "parallel"):
        replayed = replay(backend, drafts[kind], texts)
        assert [len(text.rounds) for text in replayed] == [0, 0, 1]
        assert replayed[2].rounds[0].emitted == 1


def test_a_text_that_the_target_would_not_write_is_detected(backend, drafts, asked, answers):
    prompt, answer = asked[0], list(answers[0][0])
    answer[4] = (answer[4] + 1) % 40
    [replayed] = replay(backend, drafts["trained"], [Text(prompt, answer)])
    assert replayed.other_picks >= 1


def test_the_worked_example_of_the_walk():
    assert walk_rounds([0, 0, 1, 0, 0, 2, 0, 0], prompt=3, total=8) == [
        Round(4, 1, 2), Round(6, 0, 1), Round(7, 1, 1),
    ]  # fmt: skip


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_rounds_tile_the_text(accepted, data):
    prompt = data.draw(st.integers(1, len(accepted)))
    rounds = walk_rounds(accepted, prompt=prompt, total=len(accepted))
    context = prompt + 1
    for round_ in rounds:
        assert round_.context == context
        assert round_.accepted in (round_.emitted, round_.emitted - 1)
        context += round_.emitted
    assert context == max(len(accepted), prompt + 1)


def test_bad_arguments(backend, drafts):
    with pytest.raises(ValueError, match="method"):
        replay(backend, drafts["trained"], [], method="tree")
    with pytest.raises(ValueError, match="num_draft_tokens"):
        replay(backend, drafts["trained"], [], num_draft_tokens=0)
    with pytest.raises(ValueError, match="prompt"):
        replay(backend, drafts["trained"], [Text([], [1])])
    plain = HFEagle3TargetModel(backend.model, AUX)
    with pytest.raises(ValueError, match="hidden"):
        replay(plain, drafts["trained"], [Text([1, 2], [3, 4, 5])])
