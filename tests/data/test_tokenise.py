"""From masked text to tokens, with the real SmolLM2 tokenizer."""

import copy
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fledge.core.errors import BadInput
from fledge.data.conversation import PAIR, PLAIN_TEXT, UNASKED
from fledge.data.drops import BadRow, DropReport
from fledge.data.mask import NO_REASONING, MaskedText
from fledge.data.sources import make_parts
from fledge.data.tokenise import Encoder, TokeniseOptions, tokenise_part


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


def test_a_plain_text_is_supervised_from_its_second_token_on(encoder, smollm2_tokenizer):
    text, row = one_row(encoder, {"text": "The wren is small.\n\nIt sings."})
    ids = smollm2_tokenizer("The wren is small.\n\nIt sings.")["input_ids"]
    assert row.input_ids.tolist() == ids  # as the tokenizer itself writes it
    assert row.loss_mask.tolist() == [0] + [1] * (len(ids) - 1)
    assert text.notes == (PLAIN_TEXT,)


def test_a_plain_text_begins_as_the_tokenizer_begins_texts(smollm2_tokenizer):
    """With its bos token, once; and a model without a template takes it, but no chat."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(smollm2_tokenizer)
    bos, tokenizer.chat_template = tokenizer.bos_token, None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    bare = Encoder(tokenizer, TokeniseOptions())
    ids = tokenizer("A wren.")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    for text in ("A wren.", f"{bos}A wren."):
        _, row = one_row(bare, {"text": text})
        assert row.input_ids.tolist() == ids
        assert row.loss_mask.tolist() == [0] + [1] * (len(ids) - 1)
    with pytest.raises(BadInput, match="no chat template"):
        bare.texts(chat("Q", "A"))


def test_reasoning_that_the_template_leaves_out_is_said(encoder):
    row = chat("Q", "A")
    row["messages"][1]["reasoning"] = "Because.\nOf that."
    assert encoder.texts(row)[0].notes == (NO_REASONING,)
    row["messages"][1]["content"] = "Of that. A"  # as if shown
    assert encoder.texts(row)[0].notes == ()


def test_what_was_left_out_of_kept_rows_is_counted(encoder, tmp_path):
    good, unasked, text = chat("Q", "A"), chat("Q", "A"), {"text": "Once upon a time."}
    unasked["messages"].insert(0, {"role": "assistant", "content": "Hello!"})
    path = tmp_path / "rows.jsonl"
    pair = {"prompt": "Q", "response": "A"}
    rows = [good, unasked, text, unasked, {}, pair]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [part] = make_parts([str(path)])
    made = tokenise_part(part, encoder)
    assert made.drops.kept == len(made.rows) == 5
    assert made.drops.notes == {UNASKED: 2, PLAIN_TEXT: 1, PAIR: 1}
    assert made.drops.noted[UNASKED] == [f"{path}:2", f"{path}:4"]
    assert made.drops.counts == {"no messages": 1}
    assert made.rows[1].input_ids.tolist() == made.rows[0].input_ids.tolist()
    twice = DropReport.merged([made.drops, DropReport.from_json(made.drops.to_json())])
    assert (twice.kept, twice.notes) == (10, {UNASKED: 4, PLAIN_TEXT: 2, PAIR: 2})
    assert twice.noted[UNASKED] == [f"{path}:2", f"{path}:4", f"{path}:2"]
