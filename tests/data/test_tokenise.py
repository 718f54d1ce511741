"""From masked text to tokens, with the real SmolLM2 tokenizer."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fledge.data.drops import BadRow
from fledge.data.mask import MaskedText
from fledge.data.tokenise import Encoder, TokeniseOptions


@pytest.fixture(scope="module")
def encoder(smollm2_tokenizer):
    return Encoder(smollm2_tokenizer, TokeniseOptions())


def chat(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def one_row(encoder, raw):
    [text] = encoder.texts(raw)
    [row] = encoder.encode([text], ["here"])
    return text, row


words = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(words, min_size=1, max_size=3))
def test_ids_are_the_tokenizers_own_and_the_mask_is_the_assistants(
    encoder, smollm2_tokenizer, turns
):
    answers = [f"{t}." for t in turns]
    for answer in answers:  # SmolLM2's vocabulary lacks some byte tokens, and loses such characters
        ids = smollm2_tokenizer.encode(answer, add_special_tokens=False)
        assume(smollm2_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == answer)
    raw = chat(*[t for answer in answers for t in ("Say it", answer)])
    _, row = one_row(encoder, raw)
    ids = smollm2_tokenizer.apply_chat_template(raw["messages"], tokenize=True, return_dict=False)
    assert row.input_ids.tolist() == ids
    # The supervised tokens, run by run, decode to the answers with their end token.
    runs = np.split(row.input_ids, np.flatnonzero(np.diff(row.loss_mask)) + 1)
    said = [run for run in runs if row.loss_mask[_position(runs, run)]]
    decoded = [smollm2_tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in said]
    assert decoded == [f"{answer}<|im_end|>" for answer in answers]


def _position(runs, run):
    return sum(len(r) for r in runs[: next(i for i, r in enumerate(runs) if r is run)])


def test_a_token_across_the_border_belongs_to_neither_side(encoder):
    """'\\n' + '\\n\\nHi' may merge into one token: it is not the assistant's alone."""
    text, _ = one_row(encoder, chat("Q", "\n\nHi"))
    _, pieces = encoder.encode_to_show(text, "x")
    supervised = "".join(piece for piece, flag in pieces if flag)
    assert supervised.endswith("Hi<|im_end|>")
    assert set(supervised.removesuffix("Hi<|im_end|>")) <= {"\n"}
    assert "".join(piece for piece, _ in pieces) == text.text


def test_what_is_shown_is_what_is_trained_on(smollm2_tokenizer):
    """Also where the length limit cuts, and where one character takes several tokens."""
    whole = Encoder(smollm2_tokenizer, TokeniseOptions())
    text, row = one_row(whole, chat("Q", "a 𓀀 b"))
    assert len(whole.encode_to_show(text, "x")[1]) < len(row.input_ids)
    for limit in range(int(np.argmax(row.loss_mask)) + 1, len(row.input_ids) + 1):
        encoder = Encoder(smollm2_tokenizer, TokeniseOptions(max_length=limit))
        fitted, pieces = encoder.encode_to_show(text, "x")
        assert fitted.input_ids.tolist() == row.input_ids[:limit].tolist()
        shown = "".join(piece for piece, _ in pieces)
        said = smollm2_tokenizer.decode(fitted.input_ids).rstrip("\ufffd")
        assert shown.startswith(said)
        assert len(shown) <= len(said) + 1  # a character of which only the first tokens fit


def test_offsets_are_not_trimmed(encoder):
    """A leading space is part of its token: ' world' starts at the space."""
    text = MaskedText("Hello world", ((5, 11),))
    [row] = encoder.encode([text], ["x"])
    assert row.loss_mask.tolist() == [0, 1]
    [row] = encoder.encode([MaskedText("Hello world", ((6, 11),))], ["x"])
    assert row.loss_mask.tolist() == [0, 0]


def test_length_limit(smollm2_tokenizer):
    raw = chat("Q " * 10, "A " * 50)
    whole = one_row(Encoder(smollm2_tokenizer, TokeniseOptions()), raw)[1]
    first = int(np.argmax(whole.loss_mask))

    def fit(limit, overlong="cut"):
        encoder = Encoder(smollm2_tokenizer, TokeniseOptions(max_length=limit, overlong=overlong))
        return encoder.fit(one_row(encoder, raw)[1])

    cut = fit(first + 5)
    assert len(cut.input_ids) == first + 5
    assert cut.truncated  # ends inside what the assistant said, and says so
    assert not fit(len(whole.input_ids)).truncated
    assert not fit(len(whole.input_ids) - 1).truncated  # only the newline after the end token went
    with pytest.raises(BadRow, match="cut before any supervised token"):
        fit(first)
    with pytest.raises(BadRow, match="longer than max_length"):
        fit(first + 5, "drop")


def test_options_have_a_stable_fingerprint():
    assert json.loads(TokeniseOptions().fingerprint())["max_length"] is None
    assert TokeniseOptions().fingerprint() == TokeniseOptions().fingerprint()
    assert TokeniseOptions(max_length=5).fingerprint() != TokeniseOptions().fingerprint()
