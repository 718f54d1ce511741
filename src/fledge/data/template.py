"""A model's own chat template, and what can be learned from it about the end of a turn.

The template is the only authority on how a conversation becomes text. Two facts about it are not
written down anywhere and are learned by rendering probes: which text closes the assistant's turn
(`<|im_end|>`), and which boilerplate follows that the model itself never says (`"\\n"`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from fledge.core.errors import BadInput, first_line
from fledge.data.bounded_jinja import BoundedTemplate, OutOfBounds, Span
from fledge.data.conversation import Message
from fledge.data.drops import BadRow

PROBE = "fledgeprobe"
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

_CALL_PROBE: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"k": PROBE}}}],
}

# What a template may stumble over, besides its own refusal: a shape that it does not know, a number
# that is none, a macro that calls itself.
_STUMBLES = (
    TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError,
    RuntimeError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class TurnEnd:
    """How an assistant turn ends in the rendered text: answer + closing + trail."""

    closing: str  # said by the model: its end token, with anything between it and the words
    trail: str  # boilerplate after it, never said by the model
    next_role_closes: bool = False  # no end token of its own: the next turn's role token ends it


class ChatTemplate:
    """Renders conversations and knows where assistant turns end."""

    def __init__(
        self,
        template: str,
        *,
        token_names: dict[str, Any],
        special_tokens: Sequence[str],
        options: dict[str, Any] | None = None,
    ) -> None:
        """`token_names` are what templates may name (bos_token, ...), `special_tokens` all control
        tokens of the tokenizer, `options` extra template variables (enable_thinking, ...)."""
        self.template = template
        self.has_tags = _TAG.search(template) is not None
        try:
            self._bounded = BoundedTemplate(template)
        except (*_STUMBLES, SyntaxError) as error:
            what = f"the chat template cannot be read ({first_line(error)[:120]})"
            raise BadInput(what, fix="check the model's chat_template") from None
        self._variables = {**token_names, **(options or {})}
        longest_first = sorted(set(special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._parts = False  # content as [{"type": "text", ...}]: decided by the first probe
        self._parts = self._wants_parts()

    @classmethod
    def of(cls, tokenizer: Any, options: dict[str, Any] | None = None) -> "ChatTemplate":
        """The template of a Hugging Face tokenizer."""
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not isinstance(template, str):
            raise BadInput(
                "the tokenizer has no chat template",
                where=str(tokenizer.name_or_path),
                fix="use an instruction-tuned model, or add chat_template.jinja beside it",
            )
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(
            tokenizer.all_special_tokens
        )
        return cls(
            template,
            token_names=tokenizer.special_tokens_map,
            special_tokens=sorted(special),
            options=options,
        )

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> str:
        """The text of a conversation; with `prompt`, ending where the assistant begins to speak."""
        return self._render(messages, tools, prompt=prompt, tagged=False)[0]

    def render_tagged(
        self, messages: Sequence[Message], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """The text, and the spans inside the template's `{% generation %}` tags."""
        return self._render(messages, tools, prompt=False, tagged=True)

    def _render(
        self, messages: Sequence[Message], tools: Any, *, prompt: bool, tagged: bool
    ) -> tuple[str, list[Span]]:
        variables = {
            "documents": None,
            **self._variables,
            "messages": [self._as_template_wants(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": prompt,
        }
        try:
            if tagged:
                return self._bounded.render_tagged(variables)
            return self._bounded.render(variables), []
        except OutOfBounds as error:
            raise BadRow("template goes beyond all bounds", str(error)) from None
        except _STUMBLES as error:
            raise BadRow("template refused the row", str(error)[:80]) from None

    def _as_template_wants(self, message: Message) -> Message:
        if "reasoning_content" in message:  # gpt-oss and LFM2.5 call it thinking
            message = {**message, "thinking": message["reasoning_content"]}
        if "tool_calls" in message and self._string_arguments:
            message = {**message, "tool_calls": [_stringly(c) for c in message["tool_calls"]]}
        if self._parts:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    def _wants_parts(self) -> bool:
        """Vision templates render nothing at all for plain strings: notice, and give them parts."""
        messages = [_turn("user", "x"), _turn("assistant", PROBE)]
        for self._parts in (False, True):
            try:
                if PROBE in self.render(messages):
                    return self._parts
            except BadRow:
                continue
        raise BadInput(
            "the chat template does not render a plain user / assistant exchange",
            fix="check the model's chat_template",
        )

    @cached_property
    def _string_arguments(self) -> bool:
        """DeepSeek-V3 and a few others take a call's arguments as JSON text, not as an object."""
        self._string_arguments = False  # what the probe below tries first
        try:
            self.render([_turn("user", "x"), _CALL_PROBE])
        except BadRow:
            return True
        return False

    @cached_property
    def opening(self) -> str:
        """The generation prompt: what the template says before the assistant speaks."""
        user = [_turn("user", "x")]
        plain, prompt = self.render(user), self.render(user, prompt=True)
        return prompt[len(plain) :] if prompt.startswith(plain) else ""

    @cached_property
    def text_end(self) -> TurnEnd:
        """How a turn of plain words ends."""
        return self._learn_end(_turn("assistant", PROBE), _turn("user", "y"))

    @cached_property
    def call_end(self) -> TurnEnd:
        """How a turn that ends in a tool call ends."""
        return self._learn_end(_CALL_PROBE, {**_turn("tool", "z"), "name": "f"})

    def _learn_end(self, answer: Message, follow_up: Message) -> TurnEnd:
        """Compare the text after the answer as the last turn and as a turn in the middle."""
        head = [_turn("user", "x"), answer]
        last = self.render(head).rpartition(PROBE)[2]
        try:
            middle = self.render([*head, follow_up]).rpartition(PROBE)[2]
        except BadRow:  # a template that takes no such follow-up: the last turn is all there is
            middle = last
        shared = shared_prefix(last, middle)
        ends = [match.end() for match in self._special.finditer(last)]
        if not ends:  # GLM: the next turn's role token ends this one; plain text: nothing does
            words = last.rstrip()
            closes = self._special.match(middle, len(words)) is not None
            return TurnEnd(words, last[len(words) :], next_role_closes=closes)
        agreed = [end for end in ends if end <= shared]
        # gpt-oss closes the last turn differently (<|return|>): then the last turn decides alone.
        cut = agreed[-1] if agreed else ends[0]
        return TurnEnd(last[:cut], last[cut:])

    def special_at(self, text: str, position: int) -> int:
        """End of the special token that starts at `position`, or `position` if there is none."""
        match = self._special.match(text, position)
        return match.end() if match else position

    def special_ends(self, text: str) -> list[int]:
        return [match.end() for match in self._special.finditer(text)]


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _stringly(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with its arguments as JSON text."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def shared_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix, in time linear in it."""
    low, high = 0, min(len(a), len(b)) + 1  # a[:low] is shared, a[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
