"""Random conversations, and real templates as ChatTemplate objects, for the mask tests."""

import random
import re
from pathlib import Path

from fledge.data.template import ChatTemplate

# Control tokens as the families write them; a real tokenizer lists its own.
_SPECIAL = re.compile(
    r"<\|[A-Za-z_▁0-9]+\|>|<｜[^｜<>]+｜>|<\|[a-z_]+>|<[a-z_]+\|>"
    r"|<(?:start|end)_of_(?:turn|utterance|text)>|\[/?INST\]|\[gMASK\]|<sop>"
)
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_TEXTS = [
    "Hello there.",
    "",
    "  padded  ",
    "line one\nline two\n",
    "emoji 😀 naïve",
    "a\n\n\nb",
    '{"json": [1, 2]}',
    "<b>html</b> & more",
    "x" * 50,
    "ends with a newline\n",
]
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["place"],
        },
    },
}


def load_template(directory: Path, name: str, **options) -> ChatTemplate:
    text = (directory / f"{name}.jinja").read_text()
    special = set(_SPECIAL.findall(text)) | set(_NAMES.values())
    return ChatTemplate(
        text, token_names=_NAMES, special_tokens=sorted(special), options=options or None
    )


def random_row(seed: int) -> dict:
    """A row with one to three turns: system prompts, tools, reasoning, empty and odd strings."""
    rng = random.Random(seed)
    tools, reasoning = rng.random() < 0.35, rng.random() < 0.4
    messages = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 3)):
        question = f"{rng.choice(_TEXTS)} question{turn}"  # distinct from all assistant text
        messages.append({"role": "user", "content": question})
        if tools and rng.random() < 0.6:
            arguments = {"place": rng.choice(["Oslo", "Rome"]), "days": rng.randrange(9)}
            call = {"id": "abc123def", "function": {"name": "weather", "arguments": arguments}}
            content = rng.choice(["", "Let me look."])
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            answer = {"name": "weather", "tool_call_id": "abc123def", "content": f"rain{turn}"}
            messages.append({"role": "tool", **answer})
        final = {"role": "assistant", "content": rng.choice(_TEXTS) if turn else "First answer."}
        if reasoning and rng.random() < 0.7:
            final["reasoning_content"] = rng.choice(["I think.", "step 1\nstep 2"])
        messages.append(final)
    return {"messages": messages, "tools": [_TOOL]} if tools else {"messages": messages}
