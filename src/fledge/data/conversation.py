"""One raw row -> one conversation in the form chat templates expect, or the reason why not.

Takes OpenAI `messages` and ShareGPT `conversations`, with `role/content` or `from/value`; pairs of
a question and an answer (`prompt/response`, `instruction/input/output`, ...); and plain `text`.
"""

import json
from dataclasses import dataclass
from typing import Any

from fledge.data.drops import BadRow

Message = dict[str, Any]

MESSAGE_KEYS = ("messages", "conversations", "conversation")  # where rows keep their messages
_QUESTIONS = ("instruction", "prompt", "question", "query", "input")  # where there are no messages
_ANSWERS = ("output", "response", "completion", "answer")
PAIR_KEYS = {*_QUESTIONS, *_ANSWERS}
_SYSTEM_KEYS = ("system", "system_prompt")  # the second one only beside pairs

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    "function_call": "assistant",  # ShareGPT: the value is the call itself, as JSON
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CUT = {"length", "max_tokens", "truncated"}  # finish reasons of an answer that was cut short


@dataclass(frozen=True)
class Conversation:
    """Messages in the form templates take; the last one is always the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    truncated: bool = False  # the last answer was cut by a length limit: it has no end


def plain_text(row: Any) -> str | None:
    """The text of a row that has only `text`, or None if it may be a conversation."""
    if not isinstance(row, dict):
        return None
    if any(row.get(key) is not None for key in (*MESSAGE_KEYS, *_QUESTIONS)):
        return None
    text = row.get("text")
    if isinstance(text, str) and not text.strip():
        raise BadRow("empty text")
    return text if isinstance(text, str) else None


def parse_messages(row: Any) -> list[Message]:
    """The row's messages, whatever the last role. Raises BadRow like `parse_conversation`."""
    _check_type(row, dict, "row is not an object")
    paired = _is_pair(row)
    raw = _pair_messages(row) if paired else next(row[key] for key in MESSAGE_KEYS if key in row)
    if raw is None:
        raise BadRow("no messages", f"keys: {', '.join(map(str, row))[:80]}")
    _check_type(raw, list, "messages is not a list")
    if not raw:
        raise BadRow("messages is empty")
    messages = [_parse_message(item) for item in raw]
    # ShareGPT files often keep the system prompt beside the turns
    system = next((row[key] for key in _SYSTEM_KEYS[: 1 + paired] if row.get(key)), None)
    if isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _check_type(value: Any, wanted: type, reason: str) -> None:
    if not isinstance(value, wanted):
        raise BadRow(reason, type(value).__name__)


def _is_pair(row: dict[Any, Any]) -> bool:
    return next((row[key] for key in MESSAGE_KEYS if key in row), None) is None


def _pair_messages(row: dict[Any, Any]) -> list[Any] | None:
    """A question and, if there is one, its answer, as messages. Either may itself be a list of
    messages. Alpaca's `input` is what its `instruction` refers to."""
    name = next((key for key in _QUESTIONS if row.get(key) is not None), None)
    if name is None:
        return None
    question, context = row[name], row.get("input")
    if name == "instruction" and isinstance(question, str) and isinstance(context, str) and context:
        question = f"{question}\n\n{context}"
    answer = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
    said = {"user": question, "assistant": answer} if answer is not None else {"user": question}
    messages: list[Any] = []
    for role, content in said.items():
        messages += content if isinstance(content, list) else [{"role": role, "content": content}]
    return messages


def without_unasked(messages: list[Message]) -> list[Message]:
    """The messages without those of an assistant (or its tools) before the first question."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return messages
    question = roles.index("user")
    return [m for m in messages[:question] if m["role"] == "system"] + messages[question:]


def parse_conversation(row: Any) -> Conversation:
    """Normalize one row. Raises BadRow with a short, countable reason."""
    messages = parse_messages(row)
    length = len(messages)
    while messages and messages[-1]["role"] != "assistant":  # nothing to learn after it
        messages.pop()
    if not messages:
        raise BadRow("no assistant turn")
    is_last = len(messages) == length  # the finish reason is about the row's last message
    messages = without_unasked(messages)
    _check_order(messages)
    finish = row.get("finish_reason", row.get("finish"))
    cut = (isinstance(finish, str) and finish in _CUT) or row.get("truncated") is True
    return Conversation(tuple(messages), parse_tools(row.get("tools")), cut and is_last)


def _check_order(messages: list[Message]) -> None:
    first = next(message for message in messages if message["role"] != "system")
    if first["role"] != "user":
        raise BadRow(f"{first['role']} first")
    if any(message["role"] == "system" for message in messages[1:]):
        raise BadRow("system message after the start")
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any(a["content"].strip() or a.get("tool_calls") for a in answers):
        raise BadRow("empty answer")


def _parse_message(item: Any) -> Message:
    _check_type(item, dict, "message is not an object")
    name = item.get("role", item.get("from"))
    if not isinstance(name, str):
        raise BadRow("message without a role", str(name)[:40])
    role = _ROLES.get(name.strip().lower())
    if role is None:
        raise BadRow("unknown role", name[:40])
    message: Message = {"role": role}
    content = item.get("content", item.get("value"))
    if name.strip().lower() == "function_call":
        message["tool_calls"] = [_parse_call(content)]
        content = ""
    if calls := item.get("tool_calls"):
        _check_type(calls, list, "tool_calls is not a list")
        message["tool_calls"] = [_parse_call(call) for call in calls]
    message["content"] = _parse_content(content, optional="tool_calls" in message)
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    reasoning = next((item[key] for key in _REASONING_KEYS if item.get(key)), None)
    if reasoning is not None:
        _check_type(reasoning, str, "reasoning is not text")
        message["reasoning_content"] = reasoning
    return message


def _parse_content(content: Any, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list):  # OpenAI parts: text only, joined
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise BadRow("content is not text", "a part that is not text")
        content = "".join(texts)
    _check_type(content, str, "content is not text")
    try:
        content.encode()
    except UnicodeEncodeError:  # a lone surrogate, e.g. from "\ud83d" in JSON
        raise BadRow("broken UTF-8", repr(content[:40])) from None
    return str(content)


def _parse_call(call: Any) -> dict[str, Any]:
    """One tool call in the form that transformers documents: arguments as an object."""
    if isinstance(call, str):
        call = _loads(call, "tool call is not JSON")
    _check_type(call, dict, "tool call is not an object")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("tool call without a name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}", "tool call arguments are not JSON")
    parsed = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        parsed["id"] = call["id"]
    return parsed


def parse_tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    """The tools of a row, which some files store as JSON text."""
    if isinstance(tools, str) and tools.strip():
        tools = _loads(tools, "tools is not JSON")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools is not a list of objects")
    return tuple(tools)


def _loads(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise BadRow(reason, text[:60]) from None
