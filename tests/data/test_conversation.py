"""Rows in every shape people have them, and the reason for each that cannot be used."""

import pytest

from fledge.data.conversation import parse_conversation
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
    ],
)
def test_shapes_that_mean_the_same(row):
    assert parse_conversation(row).messages == (USER, ANSWER)


def test_system_prompt_beside_the_turns():
    messages = parse_conversation({"system": "S", "conversations": [USER, ANSWER]}).messages
    assert messages[0] == {"role": "system", "content": "S"}


def test_tools_calls_and_reasoning_are_carried():
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
        ({"messages": [ANSWER, USER, ANSWER]}, "assistant first"),
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
def test_reasons(row, reason):
    with pytest.raises(BadRow) as caught:
        parse_conversation(row)
    assert caught.value.reason == reason
