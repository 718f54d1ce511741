"""From masked text to tokens, with the real SmolLM2 tokenizer."""

import copy
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data.chats import chat, write_jsonl
from fledge.core.errors import BadInput
from fledge.data.drops import BadRow, DropReport
from fledge.data.mask import MaskedText
from fledge.data.sources import make_parts
from fledge.data.tokenise import Encoder, TokeniseOptions, tokenise_part
from fledge.data.tokenizer import TokenizerFacts


@pytest.fixture(scope="module")
def encoder(smollm2_tokenizer):
    return Encoder(smollm2_tokenizer, TokeniseOptions())


def one_row(encoder, raw):
    [text] = encoder.texts(raw)
    [row] = encoder.encode([text], ["here"])
    return text, row


words = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(words, min_size=1, max_size=3))
def test_ids_equal_the_tokenizers_and_the_mask_covers_the_answers(
    encoder, smollm2_tokenizer, turns
):
    answers = [f"{t}." for t in turns]
    # leading white space may merge with the template's newline: see the test below
    assume(not any(answer[0].isspace() for answer in answers))
    for answer in answers:  # SmolLM2 lacks some byte tokens and loses such characters
        ids = smollm2_tokenizer.encode(answer, add_special_tokens=False)
        assume(smollm2_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == answer)
    raw = chat(*[t for answer in answers for t in ("Say it", answer)])
    _, row = one_row(encoder, raw)
    ids = smollm2_tokenizer.apply_chat_template(raw["messages"], tokenize=True, return_dict=False)
    assert row.input_ids.tolist() == ids
    # The supervised tokens, run by run, decode to the answers with their end token.
    cuts = np.flatnonzero(np.diff(row.loss_mask)) + 1
    runs = zip(np.split(row.input_ids, cuts), np.split(row.loss_mask, cuts), strict=True)
    decoded = [
        smollm2_tokenizer.decode(run, clean_up_tokenization_spaces=False)
        for run, flags in runs
        if flags[0]
    ]
    assert decoded == [f"{answer}<|im_end|>" for answer in answers]


def test_a_token_across_the_boundary_is_not_supervised(encoder):
    """'\\n' + '\\n\\nHi' may merge into one token, which is then not only the assistant's."""
    text, _ = one_row(encoder, chat("Q", "\n\nHi"))
    _, pieces = encoder.encode_to_show(text, "x")
    supervised = "".join(piece for piece, flag in pieces if flag)
    assert supervised.endswith("Hi<|im_end|>")
    assert set(supervised.removesuffix("Hi<|im_end|>")) <= {"\n"}
    assert "".join(piece for piece, _ in pieces) == text.text


def test_the_preview_shows_what_is_trained_on(smollm2_tokenizer):
    """Also at the length limit, and where one character takes several tokens."""
    whole = Encoder(smollm2_tokenizer, TokeniseOptions())
    text, row = one_row(whole, chat("Q", "a 𓀀 b"))
    assert len(whole.encode_to_show(text, "x")[1]) < len(row.input_ids)
    for limit in range(int(np.argmax(row.loss_mask)) + 1, len(row.input_ids) + 1):
        encoder = Encoder(smollm2_tokenizer, TokeniseOptions(max_length=limit))
        fitted, pieces = encoder.encode_to_show(text, "x")
        assert fitted.input_ids.tolist() == row.input_ids[:limit].tolist()
        shown = "".join(piece for piece, _ in pieces)
        decoded = smollm2_tokenizer.decode(fitted.input_ids).rstrip("\ufffd")
        assert shown.startswith(decoded)
        assert len(shown) <= len(decoded) + 1  # a character whose last tokens do not fit


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
    assert cut.truncated  # ends within an answer, and is marked as such
    for cut_off in (0, 1):  # one: only the newline after the end token is cut
        assert not fit(len(whole.input_ids) - cut_off).truncated
    with pytest.raises(BadRow, match="cut before any supervised token"):
        fit(first)
    with pytest.raises(BadRow, match="longer than max_length"):
        fit(first + 5, "drop")


def test_a_plain_text_is_supervised_from_its_second_token_on(encoder, smollm2_tokenizer):
    _, row = one_row(encoder, {"text": "The wren is small.\n\nIt sings."})
    ids = smollm2_tokenizer("The wren is small.\n\nIt sings.")["input_ids"]
    assert row.input_ids.tolist() == ids  # as the tokenizer encodes it
    assert row.loss_mask.tolist() == [0] + [1] * (len(ids) - 1)


def test_a_plain_text_starts_with_bos_where_the_tokenizer_adds_it(smollm2_tokenizer):
    """Exactly once. A model without a chat template accepts plain text, but no chats."""
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


def test_kept_and_dropped_rows_are_counted(encoder, tmp_path):
    good, unasked, text = chat("Q", "A"), chat("Q", "A"), {"text": "Once upon a time."}
    unasked["messages"].insert(0, {"role": "assistant", "content": "Hello!"})
    path = tmp_path / "rows.jsonl"
    rows = [good, unasked, text, {}, {"prompt": "Q", "response": "A"}]
    write_jsonl(path, rows)
    [part] = make_parts([str(path)])
    tokenized = tokenise_part(part, encoder)
    assert tokenized.drops.kept == len(tokenized.rows) == 4
    assert tokenized.drops.counts == {"no messages": 1}
    assert tokenized.rows[1].input_ids.tolist() == tokenized.rows[0].input_ids.tolist()
    merged = DropReport.merged([tokenized.drops.to_json()] * 2)
    assert (merged.kept, merged.counts) == (8, {"no messages": 2})


def test_a_tokenizer_is_read_once(tiny_target, tmp_path, monkeypatch):
    """What is kept equals what was read, for these files only; and torch is not imported again."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    model, chats = tmp_path / "model", write_jsonl(tmp_path / "chats.jsonl", [chat("hi", "1 2 3")])
    shutil.copytree(tiny_target, model)
    first = TokenizerFacts.load(model)
    program = (
        "import sys; from fledge.cli.data import preview; "
        f"preview([{str(chats)!r}], {str(model)!r}); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "False", shown.stderr
    monkeypatch.setattr(TokenizerFacts, "of", lambda _: pytest.fail("read again"))
    assert TokenizerFacts.load(model) == first
    for untold in ({"trust_remote_code": True}, {}):
        with pytest.raises(pytest.fail.Exception, match="read again"):
            TokenizerFacts.load(model, **untold)
        (model / "chat_template.jinja").write_text("another")
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 1


def test_damaged_facts_are_read_again(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    facts = TokenizerFacts.load(tiny_target)
    [kept] = (tmp_path / "tokenizers").iterdir()
    for damaged in ("", "[]", "{}", kept.read_text()[:50]):
        kept.write_text(damaged)
        assert TokenizerFacts.load(tiny_target) == facts
