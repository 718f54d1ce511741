"""Rows in all common formats, and the reason why a row is dropped."""

import pytest

from fledge.data.conversation import (
    parse_conversation,
    parse_messages,
    plain_text,
)
from fledge.data.drops import BadRow

USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"conversations": [USER, ANSWER]},
        {"messages": [{"role": "User", "content": "Q"}, {"role": "model", "content": "A"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, ANSWER]},
        {"messages": [USER, ANSWER, {"role": "user", "content": "never answered"}]},
        {"prompt": "Q", "response": "A"},
        {"prompt": "Q", "completion": "A"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "Q", "input": "", "output": "A", "text": "### Q ### A"},
        {"question": "Q", "answer": "A"},
        {"input": "Q", "output": "A"},
        {"messages": None, "prompt": "Q", "response": "A"},
        {"messages": [USER, ANSWER], "prompt": "another"},
    ],
)
def test_equivalent_formats_parse_alike(row):
    assert parse_conversation(row).messages == (USER, ANSWER)


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"system": "S", "conversations": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"prompt": "Q", "response": "A", "system_prompt": "S"}, [SYSTEM, USER, ANSWER]),
        # beside messages it was never read; existing data keeps its meaning
        ({"messages": [USER, ANSWER], "system_prompt": "S"}, [USER, ANSWER]),
        ({"instruction": "Q", "input": "more", "output": "A", "system": "S"},
         [SYSTEM, {"role": "user", "content": "Q\n\nmore"}, ANSWER]),
    ],
)  # fmt: skip
def test_system_prompts_and_inputs_are_placed(row, messages):
    assert parse_conversation(row).messages == tuple(messages)


def test_a_prompt_alone_has_messages_but_is_not_a_conversation():
    assert parse_messages({"prompt": "Q"}) == [USER]
    with pytest.raises(BadRow, match="no assistant turn"):
        parse_conversation({"prompt": "Q"})


@pytest.mark.parametrize("before", [[ANSWER], [ANSWER, {"role": "tool", "content": "t"}, ANSWER]])
def test_an_answer_before_any_question_is_dropped_but_its_row_is_kept(before):
    for begin in ([], [SYSTEM]):
        parsed = parse_conversation({"messages": [*begin, *before, USER, ANSWER]})
        assert parsed.messages == (*begin, USER, ANSWER)


def test_plain_text_is_a_row_without_a_conversation():
    assert plain_text({"text": "Once upon a time", "source": "x"}) == "Once upon a time"
    for row in ({"text": "x", "messages": [USER]}, {"text": "x", "prompt": "Q"}, {"text": 3}, "x"):
        assert plain_text(row) is None
    with pytest.raises(BadRow, match="empty text"):
        plain_text({"text": " "})


def test_tools_calls_and_reasoning_are_kept():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
            {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"},
            ANSWER,
        ],
    }
    parsed = parse_conversation(row)
    assert parsed.tools == ({"type": "function", "function": {"name": "f"}},)
    assert parsed.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        ],
    }
    assert parsed.messages[2]["tool_call_id"] == "1"


def test_sharegpt_function_calls():
    row = {
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "A"},
        ]
    }
    roles = [message["role"] for message in parse_conversation(row).messages]
    assert roles == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "row is not an object"),
        ({"text": "x"}, "no messages"),
        ({"messages": "x"}, "messages is not a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [ANSWER]}, "assistant first"),
        ({"messages": [ANSWER, USER]}, "assistant first"),
        ({"prompt": "Q", "response": " "}, "empty answer"),
        ({"prompt": "Q", "response": 3}, "content is not text"),
        ({"messages": [USER, "x"]}, "message is not an object"),
        ({"messages": [{"content": "x"}, ANSWER]}, "message without a role"),
        ({"messages": [{"role": "narrator", "content": "x"}, ANSWER]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "content is not text"),
        (
            {"messages": [{"role": "user", "content": [{"image": 1}]}, ANSWER]},
            "content is not text",
        ),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty answer"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud83d"}]}, "broken UTF-8"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "tools is not JSON"),
        ({"messages": [USER, ANSWER], "tools": ["x"]}, "tools is not a list of objects"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "f"}]}, "tool_calls is not a list"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{}]}]}, "tool call without a name"),
        ({"messages": [USER, {**ANSWER, "reasoning": 1}]}, "reasoning is not text"),
        (
            {"messages": [USER, ANSWER, {"role": "system", "content": "x"}, USER, ANSWER]},
            "system message after the start",
        ),
    ],
)
def test_unusable_rows_have_a_reason(row, reason):
    with pytest.raises(BadRow) as caught:
        parse_conversation(row)
    assert caught.value.reason == reason
