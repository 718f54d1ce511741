"""One conversation regenerated: the user's turns stay, every answer is the target's own.

Turn by turn: the question of a turn is everything before it, the new answers included.

    row         user  assistant  user  assistant
    question 1  user
    question 2  user  reply 1    user
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

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
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"


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

        A generation prompt may have opened the thought already: the end mark alone decides. A
        thought that was cut short has no answer behind it.
        """
        if not reasoning and _THOUGHT_ENDS in text:
            reasoning, _, text = text.partition(_THOUGHT_ENDS)
        elif not reasoning and cut and text.lstrip().startswith(_THOUGHT_BEGINS):
            reasoning, text = text, ""
        reasoning = reasoning.strip().removeprefix(_THOUGHT_BEGINS).strip()
        words = text.lstrip("\n") if reasoning else text
        return cls(words, "length" if cut else "stop", tokens, reasoning)


class Dialogue:
    """A row on its way; raises BadRow for one that cannot be asked again."""

    def __init__(self, row: Any, *, keep_reasoning: bool = True) -> None:
        self._keep_reasoning = keep_reasoning
        self._left = deque(_script(row))
        self.said: list[Message] = []
        self.tools = parse_tools(row.get("tools"))  # shown, though the target may not call them
        self.tokens = 0
        self.truncated = False
        self._listen()

    @property
    def question(self) -> list[Message] | None:
        """What the target is asked next; None when the dialogue is complete."""
        return self.said if self.said[-1]["role"] != "assistant" else None

    @property
    def last(self) -> bool:
        """Nothing is asked after this question."""
        return all(message["role"] == "assistant" for message in self._left)

    def _listen(self) -> None:
        """Up to the next answer."""
        while self._left and self._left[0]["role"] != "assistant":
            self.said.append(self._left.popleft())

    def hear(self, reply: Reply) -> None:
        """Take an answer. A truncated one ends the conversation: nothing sensible could follow."""
        if not reply.text.strip() and reply.finish == "stop":
            raise BadRow("empty answer", f"turn {self._turns + 1}")
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning and self._keep_reasoning:
            message["reasoning_content"] = reply.reasoning
        self.tokens += reply.tokens
        self.said = [*self.said, message]
        while self._left and self._left[0]["role"] == "assistant":
            self._left.popleft()
        if reply.finish == "length":
            self.truncated = True
            self._left.clear()
        self._listen()

    @property
    def _turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.said)

    def new_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row as it was, with its messages replaced and how the last answer ended."""
        gone = _REPLACED if any(key in row for key in MESSAGE_KEYS) else _REPLACED | PAIR_KEYS
        kept = {key: value for key, value in row.items() if key not in gone}
        finish = "length" if self.truncated else "stop"
        return {**kept, "messages": self.said, "finish": finish, "tokens": self.tokens}


def _script(row: Any) -> list[Message]:
    """The row's turns, the old answers still in place as marks of where new ones belong."""
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        row = {"messages": [{"role": "user", "content": row["prompt"]}]}
    messages = without_unasked(parse_messages(row))
    if any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        raise BadRow("tool calls", "what a tool answered belongs to the old call")
    spoken = [m for m in messages if m["role"] != "system"]
    if not spoken or spoken[0]["role"] != "user":
        raise BadRow(f"{spoken[0]['role']} first" if spoken else "nothing to answer")
    return messages
