"""Regenerating one conversation: the user's turns stay, every answer becomes the target's own.

The question of each turn is everything before it, including the new answers.

    row         user  assistant  user  assistant
    question 1  user
    question 2  user  reply 1    user

`Task` and `Answerer` are the protocol between the job and what answers its rows.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fledge.data.conversation import (
    MESSAGE_KEYS,
    PAIR_KEYS,
    Message,
    parse_messages,
    parse_tools,
    without_unasked,
)
from fledge.data.drops import BadRow

_REPLACED = {*MESSAGE_KEYS, "prompt", "system", "finish", "finish_reason", "truncated", "tokens"}
_REASONING_START, _REASONING_END = "<think>", "</think>"


@dataclass(frozen=True)
class Reply:
    """The target's answer to one question."""

    text: str
    finish: Literal["stop", "length"]
    tokens: int
    reasoning: str = ""

    @classmethod
    def of(cls, text: str, *, cut: bool, tokens: int, reasoning: str = "") -> "Reply":
        """Split reasoning from the answer where the server did not.

        The generation prompt may have opened the reasoning already, so the end mark alone decides.
        Reasoning that was cut short has no answer after it.
        """
        if not reasoning and _REASONING_END in text:
            reasoning, _, text = text.partition(_REASONING_END)
        elif not reasoning and cut and text.lstrip().startswith(_REASONING_START):
            reasoning, text = text, ""
        reasoning = reasoning.strip().removeprefix(_REASONING_START).strip()
        answer = text.lstrip("\n") if reasoning else text
        return cls(answer, "length" if cut else "stop", tokens, reasoning)


class Dialogue:
    """The state of a row that is being answered; raises BadRow if it cannot be regenerated."""

    def __init__(self, row: Any) -> None:
        self._remaining = deque(_turns_of(row))
        self.said: list[Message] = []  # the messages so far
        self.tools = parse_tools(row.get("tools"))  # in the prompt; calls are not supported
        self.tokens = 0
        self.truncated = False
        self._copy_to_next_answer()

    @property
    def question(self) -> list[Message] | None:
        """What the target is asked next, or None when the dialogue is complete."""
        return self.said if self.said[-1]["role"] != "assistant" else None

    def _copy_to_next_answer(self) -> None:
        """Copy the messages up to the next answer."""
        while self._remaining and self._remaining[0]["role"] != "assistant":
            self.said.append(self._remaining.popleft())

    def hear(self, reply: Reply) -> None:
        """Add an answer. A truncated one ends the conversation: nothing sensible could follow."""
        if not reply.text.strip() and reply.finish == "stop":
            turns = sum(message["role"] == "assistant" for message in self.said)
            raise BadRow("empty answer", f"turn {turns + 1}")
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        self.tokens += reply.tokens
        self.said = [*self.said, message]
        while self._remaining and self._remaining[0]["role"] == "assistant":
            self._remaining.popleft()
        if reply.finish == "length":
            self.truncated = True
            self._remaining.clear()
        self._copy_to_next_answer()

    def new_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The original row with its messages replaced, and how the last answer ended."""
        replaced = _REPLACED if any(key in row for key in MESSAGE_KEYS) else _REPLACED | PAIR_KEYS
        kept = {key: value for key, value in row.items() if key not in replaced}
        finish = "length" if self.truncated else "stop"
        return {**kept, "messages": self.said, "finish": finish, "tokens": self.tokens}


def _turns_of(row: Any) -> list[Message]:
    """The row's messages; its old answers mark where the new ones belong."""
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        row = {"messages": [{"role": "user", "content": row["prompt"]}]}
    messages = without_unasked(parse_messages(row))
    if any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        raise BadRow("tool calls", "what a tool answered belongs to the old call")
    turns = [m for m in messages if m["role"] != "system"]
    if not turns or turns[0]["role"] != "user":
        raise BadRow(f"{turns[0]['role']} first" if turns else "nothing to answer")
    return messages


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A row to answer."""

    number: int  # in the data, from 0
    place: str
    row: dict[str, Any]
    dialogue: Dialogue
    shard: str = ""  # where the answer is recorded


@dataclass(frozen=True)
class EndedTask:
    """A finished task: its dialogue is complete, or `bad` is the reason why not."""

    task: Task
    bad: BadRow | None = None
    hopeless: bool = False  # any other row would fail, too: the server is down


class Answerer(Protocol):
    """Answers tasks: takes new ones while it has capacity, and reports each when finished."""

    together: int  # size of consecutive groups of rows whose answers may depend on one another

    def identity(self) -> dict[str, Any]:
        """Target and template: what must not change when a job is resumed."""
        ...

    def run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None: ...
