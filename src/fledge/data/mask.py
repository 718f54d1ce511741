"""The loss mask in characters, before tokenization: which part of a conversation the model wrote.

The definition: the supervised text of a turn is what the model itself would have generated, from
the end of the generation prompt to its end token, both taken from the model's own template:

    prompt  = render(messages[:i], with the generation prompt)
    full    = render(messages[:i + 1])
    spoken  = full[len(prompt) : len(full) - len(boilerplate after the end token)]

Worked example (ChatML), supervised text in brackets:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n[Hello!<|im_end|>]\\n

A template that rewrites history (drops earlier reasoning, closes a past turn differently) makes
`full` of an early turn differ from the same part of the whole conversation. Then the early turn
gets a row of its own, with the history as the model saw it. `{% generation %}` tags, where a
template has them, narrow the spans further (text inside a turn that the model did not generate).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fledge.data.conversation import Conversation, Message
from fledge.data.drops import BadRow
from fledge.data.template import PROBE, ChatTemplate, Span, shared_prefix

LONGEST_ROW = 1 << 23  # characters; a longer conversation is dropped before it is rendered
# Every answer is located by rendering the conversation up to it. So that a row takes seconds rather
# than hours, rows with too many answers for their length are dropped.
_MOST_RENDERED = 1 << 28  # characters, summed over all answers

# Opening and closing markers of reasoning in common templates.
_REASONING = [
    ("<think>", "</think>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("[THINK]", "[/THINK]"),  # Mistral
]


@dataclass(frozen=True)
class MaskedText:
    """One row before tokenization: text, supervised spans (ascending, disjoint), and whether the
    last answer was cut short in the data (then its end token is left out of text and spans)."""

    text: str
    spans: tuple[Span, ...]
    truncated: bool = False

    def supervised(self) -> list[str]:
        return [self.text[start:end] for start, end in self.spans]


@dataclass(frozen=True)
class _Turn:
    """One assistant turn in the context the model saw: `full[start:end]` is what it generated."""

    full: str
    start: int
    end: int
    spans: tuple[Span, ...]  # within [start, end), narrowed by tags and masked reasoning
    closing: str  # the end token, which the generated text ends with

    @property
    def spoken_to(self) -> str:
        return self.full[: self.end]


def masked_texts(
    conversation: Conversation,
    template: ChatTemplate,
    *,
    last_turn_only: bool = False,
    mask_reasoning: bool = False,
) -> list[MaskedText]:
    """The rows of one conversation: one, or several when the template rewrites history."""
    messages = conversation.messages
    turn_indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turn_indices = turn_indices[-1:] if last_turn_only else turn_indices
    _check_size(conversation, len(turn_indices))
    try:
        last = _render_turn(conversation, turn_indices[-1], template, mask_reasoning)
    except BadRow:  # report the first turn that fails, not the last
        for i in turn_indices[:-1]:
            _render_turn(conversation, i, template, mask_reasoning)
        raise
    shared, turns = [], []  # the last turn's row includes every earlier turn it repeats unchanged
    for i in turn_indices[:-1]:
        turn = _render_turn(conversation, i, template, mask_reasoning)
        if last.full.startswith(turn.spoken_to):
            shared.append(turn.spans)  # without the text: keeping every turn's would be quadratic
        else:
            turns.append(turn)
    rows = [_assemble(last, [*shared, last.spans], template, truncated=conversation.truncated)]
    while turns:  # the same again for the turns that no row includes yet
        row = turns[-1]
        shared = [turn.spans for turn in turns if row.full.startswith(turn.spoken_to)]
        turns = [turn for turn in turns if not row.full.startswith(turn.spoken_to)]
        rows.append(_assemble(row, shared, template, truncated=False))
    return rows[::-1]


def _check_size(conversation: Conversation, answers: int) -> None:
    """Drop a row that would take too long to render, before anything is rendered."""
    row = [conversation.messages, conversation.tools]
    characters = len(json.dumps(row, ensure_ascii=False))
    if characters > LONGEST_ROW:
        raise BadRow("row is too long", f"more than {LONGEST_ROW:,} characters")
    if answers * characters > _MOST_RENDERED:
        raise BadRow("too many turns", f"{answers:,} answers in {characters:,} characters")


def _assemble(
    row: _Turn, shared: Sequence[Sequence[Span]], template: ChatTemplate, *, truncated: bool
) -> MaskedText:
    text, spans = row.full, [span for turn in shared for span in turn]
    if template.text_end.next_role_closes:
        spans = [(start, template.special_at(text, end)) for start, end in spans]
    if truncated and row.spoken_to.endswith(row.closing):
        text = text[: row.end - len(row.closing)]
    spans = [(start, min(end, len(text))) for start, end in spans if start < len(text)]
    return MaskedText(text, tuple(spans), truncated)


def _render_turn(
    conversation: Conversation, index: int, template: ChatTemplate, mask_reasoning: bool
) -> _Turn:
    """Find the bounds of the assistant turn at `messages[index]`, or raise BadRow."""
    messages, tools = conversation.messages[: index + 1], conversation.tools
    prompt = template.render(messages[:-1], tools, prompt=True)
    if template.has_tags:
        full, tags = template.render_tagged(messages, tools)
    else:
        full, tags = template.render(messages, tools), None
    start = _answer_start(prompt, full, messages, tools, template)
    if start is None:  # gpt-oss: the answer changed the history before it; keep what the model saw
        start = _answer_start_after_rewrite(full, messages, tools, template)
        shift = len(prompt) - start
        full, start = prompt + full[start:], len(prompt)
        tags = None if tags is None else [(a + shift, b + shift) for a, b in tags]
    turn_end = template.call_end if messages[-1].get("tool_calls") else template.text_end
    if not full.endswith(turn_end.trail):
        raise BadRow("cannot tell where the answer ends", repr(full[-40:]))
    end = len(full) - len(turn_end.trail)
    _check_spoken(full[start:end], messages[-1])
    spans: list[Span] = [(start, end)]
    if tags is not None:
        spans = [(max(start, a), min(end, b)) for a, b in tags if a < end and b > start]
    if mask_reasoning:
        spans = _subtract(spans, _reasoning_spans(full, start, end))
    return _Turn(full, start, end, _merged(spans), turn_end.closing)


def _answer_start(
    prompt: str, full: str, messages: Sequence[Message], tools: object, template: ChatTemplate
) -> int | None:
    """Where the answer starts: at the end of the prompt, if the full text repeats the prompt.

    Some prompts contain more than the full text repeats (DeepSeek-R1 prefills `<think>` and then
    drops the reasoning). Then it starts after the longest repeated part of the generation prompt
    that ends with a line or a special token. None: the answer changed the history before it.
    """
    if full.startswith(prompt):
        # After a tool's answer some templates print the opening only in the full text.
        repeated = template.opening and full.startswith(template.opening, len(prompt))
        return len(prompt) + (len(template.opening) if repeated else 0)
    plain = template.render(messages[:-1], tools)
    if prompt.startswith(plain) and full.startswith(plain):
        opening = prompt[len(plain) :]
        cuts = template.special_ends(opening) + [m.end() for m in re.finditer("\n", opening)]
        for cut in sorted(cuts, reverse=True):
            if full.startswith(opening[:cut], len(plain)):
                return len(plain) + cut
    return None


def _answer_start_after_rewrite(
    full: str, messages: Sequence[Message], tools: object, template: ChatTemplate
) -> int:
    """Where the answer starts if it changed the history: another answer changes it in the same way,
    so the text that the two share ends just after the opening of the turn."""
    other: Message = {"role": "assistant", "content": PROBE}
    shared = shared_prefix(full, template.render([*messages[:-1], other], tools))
    opening_at = full.rfind(template.opening, 0, shared) if template.opening else -1
    if opening_at < 0:
        raise BadRow("cannot tell where the answer begins", repr(full[-40:]))
    return opening_at + len(template.opening)


def _check_spoken(spoken: str, message: Message) -> None:
    """Check that the template rendered the answer and did not silently leave it out."""
    answer = message["content"].rpartition("</think>")[2].strip()
    if answer and answer.splitlines()[-1].strip() not in spoken:
        raise BadRow("template does not render the answer", repr(answer[-40:]))
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in spoken:
            raise BadRow("template does not render tool calls", call["function"]["name"][:40])


def _reasoning_spans(text: str, start: int, end: int) -> list[Span]:
    """Spans of reasoning in text[start:end], markers included; the prompt may have opened it."""
    spans: list[Span] = []
    for opening, closing in _REASONING:
        opened = text[:start].rstrip().endswith(opening.rstrip())
        begin = start if opened else text.find(opening, start, end)
        while begin >= 0:
            stop = text.find(closing, begin, end)
            stop = end if stop < 0 else stop + len(closing)
            spans.append((begin, stop))
            begin = text.find(opening, stop, end)
    return spans


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The non-empty spans in order, adjacent ones merged."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return tuple(merged)


def _subtract(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """`spans` without `holes`."""
    for hole_start, hole_end in holes:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, hole_start)), (max(start, hole_end), end))
            if piece[0] < piece[1]
        ]
    return list(spans)
