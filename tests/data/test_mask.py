"""Masks for ChatML, Mistral and plain concatenation; options; cut answers; refusals."""

import re

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


PREFILLED = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
TWO = chat("Q one", "A one", "Q two", "A two")
MASKED, LAST = {"mask_reasoning": True}, {"last_turn_only": True}


@pytest.mark.parametrize(
    ("text", "conversation", "options", "said"),
    [
        (CHATML, TWO, {}, ["A one<|im_end|>", "A two<|im_end|>"]),
        (MISTRAL, TWO, {}, [" A one</s>", " A two</s>"]),
        (PLAIN, TWO, {}, ["A one", "A two"]),
        (CHATML, TWO, LAST, ["A two<|im_end|>"]),
        (CHATML, chat("Q", "<think>hm\nhm</think>A<think>again</think>B"), MASKED,
         ["A", "B<|im_end|>"]),
        (PREFILLED, chat("Q", "<think>\nhm</think>A"), MASKED, ["A<|im_end|>"]),
        # the model did not emit its end token there, so it must not be trained
        (CHATML, chat("Q", "A1", "Q", "A2", finish="length"), {}, ["A1<|im_end|>", "A2"]),
        (CHATML, chat("Q", "A1", finish="stop"), {}, ["A1<|im_end|>"]),
    ],
)  # fmt: skip
def test_what_is_supervised(text, conversation, options, said):
    [row] = masked_texts(conversation, template(text), **options)
    assert row.supervised() == said
    assert row.truncated == conversation.truncated
    assert "A1" not in said[0] or row.text.endswith(said[-1] + "\n" * (not row.truncated))
    assert all(message["content"] in row.text for message in conversation.messages)


def test_an_answer_that_repeats_the_question_is_still_found():
    [row] = masked_texts(chat("same", "same", "same", "same"), template(PLAIN))
    assert row.text == "same" * 4
    assert row.spans == ((4, 8), (12, 16))


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [  # the full text does not continue with the generation prompt; it cuts answers; it raises
        (CHATML.replace("'<|im_start|>assistant\n' }}{% endif", "'>>> ' }}{% endif"), "A",
         "where the answer begins"),
        (CHATML.replace("m['content'] }}", "m['content'][:20] }}"), "word " * 20 + "end",
         "does not render the answer"),
        ("{{ raise_exception('no A here') if messages[-1]['content'] == 'A' }}" + CHATML, "A",
         "template refused the row.*no A here"),
    ],
)  # fmt: skip
def test_a_row_that_its_template_does_not_render_is_dropped(text, answer, reason):
    with pytest.raises(BadRow) as caught:
        masked_texts(chat("Q", answer), template(text))
    assert re.search(reason, f"{caught.value.reason}: {caught.value.detail}")


def test_a_template_that_swallows_answers_is_refused():
    with pytest.raises(BadInput, match="does not render"):
        template(PLAIN.replace("m['content']", "m['content'] if m['role'] == 'user' else ''"))
