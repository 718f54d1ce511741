"""Masks for ChatML, Mistral and plain concatenation; options; cut answers; refusals."""

import pytest

from data import chats
from fledge.core.errors import BadInput
from fledge.data.conversation import parse_conversation
from fledge.data.drops import BadRow
from fledge.data.mask import masked_texts
from fledge.data.template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<s>", "</s>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def template(text):
    return ChatTemplate(text, token_names=NAMES, special_tokens=SPECIAL)


def chat(*turns, **more):
    return parse_conversation(chats.chat(*turns, **more))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHATML, ["A one<|im_end|>", "A two<|im_end|>"]),
        (MISTRAL, [" A one</s>", " A two</s>"]),
        (PLAIN, ["A one", "A two"]),
    ],
)
def test_answers_and_end_tokens_are_supervised(text, said):
    [row] = masked_texts(chat("Q one", "A one", "Q two", "A two"), template(text))
    assert row.supervised() == said


def test_an_answer_that_repeats_the_question_is_still_found():
    [row] = masked_texts(chat("same", "same", "same", "same"), template(PLAIN))
    assert row.text == "same" * 4
    assert row.spans == ((4, 8), (12, 16))


def test_last_turn_only():
    [row] = masked_texts(chat("Q1", "A1", "Q2", "A2"), template(CHATML), last_turn_only=True)
    assert row.supervised() == ["A2<|im_end|>"]
    assert "A1" in row.text


def test_reasoning_can_be_masked():
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "<think>hm\nhm</think>A<think>again</think>B"},
    ]
    conversation = parse_conversation({"messages": messages})
    [row] = masked_texts(conversation, template(CHATML), mask_reasoning=True)
    assert row.supervised() == ["A", "B<|im_end|>"]


def test_reasoning_opened_by_the_prompt_is_masked_too():
    prefilled = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    conversation = chat("Q", "<think>\nhm</think>A")
    [row] = masked_texts(conversation, template(prefilled), mask_reasoning=True)
    assert row.supervised() == ["A<|im_end|>"]


def test_an_answer_cut_by_a_length_limit_has_no_end_token():
    """`finish: length`: the model did not emit its end token there, so it must not be trained."""
    [row] = masked_texts(chat("Q1", "A1", "Q2", "A2", finish="length"), template(CHATML))
    assert row.truncated
    assert row.supervised() == ["A1<|im_end|>", "A2"]
    assert row.text.endswith("A2")
    [row] = masked_texts(chat("Q1", "A1", finish="stop"), template(CHATML))
    assert not row.truncated
    assert row.supervised() == ["A1<|im_end|>"]


def test_a_row_without_clear_boundaries_is_dropped():
    # The full text does not continue with the generation prompt.
    odd = CHATML.replace("'<|im_start|>assistant\n' }}{% endif", "'>>> ' }}{% endif")
    with pytest.raises(BadRow, match="where the answer begins"):
        masked_texts(chat("Q", "A"), template(odd))


def test_a_template_that_swallows_answers_is_refused():
    swallows = PLAIN.replace("m['content']", "m['content'] if m['role'] == 'user' else ''")
    with pytest.raises(BadInput, match="does not render"):
        template(swallows)
    shortens = CHATML.replace("m['content'] }}", "m['content'][:20] }}")
    with pytest.raises(BadRow, match="does not render the answer"):
        masked_texts(chat("Q", "word " * 20 + "end"), template(shortens))


def test_a_template_error_drops_the_row_with_its_message():
    strict = "{{ raise_exception('no system here') if messages[0]['role'] == 'system' }}" + CHATML
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    with pytest.raises(BadRow) as caught:
        masked_texts(parse_conversation({"messages": messages}), template(strict))
    assert caught.value.reason == "template refused the row"
    assert "no system here" in caught.value.detail
