"""The prompts that a draft is evaluated on: from files, or the set that ships with the project."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, nearest
from fledge.data.conversation import Message
from fledge.data.drops import BadRow
from fledge.data.sources import make_parts
from fledge.data.template import ChatTemplate

SETS = {"mixed": Path(__file__).parent / "mixed_prompts.jsonl"}


@dataclass(frozen=True)
class Prompt:
    """A conversation to be continued; `followups` are the user's next messages, turn by turn."""

    name: str
    group: str  # the file or set it came from
    category: str
    messages: tuple[Message, ...]
    followups: tuple[str, ...] = ()


def read_prompts(sources: Sequence[str], *, limit: int | None = None) -> list[Prompt]:
    """All prompts of some files or named sets; at most `limit` per source, evenly spread."""
    prompts: list[Prompt] = []
    for source in sources:
        path = str(SETS.get(source, source))
        if source not in SETS and not Path(source).exists():
            fix = f"give a file, or a set: {nearest(source, sorted(SETS))}"
            raise BadInput(f"no such prompts '{source}'", where="--prompts", fix=fix)
        group = source if source in SETS else Path(source).name.partition(".")[0]
        rows = [row for part in make_parts([path]) for row in part.rows()]
        prompts += [_prompt(place, row, group) for place, row in _spread(rows, limit)]
    if not prompts:
        raise BadInput("no prompts", where=", ".join(sources))
    return prompts


def given_prompts(rows: Sequence[Mapping[str, Any]], *, limit: int | None = None) -> list[Prompt]:
    """Prompts from rows in the format of a prompt file."""
    placed = [(f"prompt {number}", dict(row)) for number, row in enumerate(rows, 1)]
    return [_prompt(place, row, "given") for place, row in _spread(placed, limit)]


def _spread(rows: list[tuple[str, Any]], limit: int | None) -> list[tuple[str, Any]]:
    """At most `limit` of the rows, evenly spread."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def _prompt(place: str, row: Any, group: str) -> Prompt:
    fix = 'expected {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}'
    if isinstance(row, BadRow):
        raise BadInput(str(row), where=place)
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        raise BadInput("no messages in this row", where=place, fix=fix)
    while messages and messages[-1]["role"] == "assistant":  # the target gives its own answer
        messages = messages[:-1]
    if not messages:
        raise BadInput("nothing to answer in this row", where=place, fix=fix)
    followups = row.get("followups") or []
    if not isinstance(followups, list) or not all(isinstance(text, str) for text in followups):
        raise BadInput("followups must be texts", where=place)
    name, category = str(row.get("id", place)), str(row.get("category") or group)
    return Prompt(name, group, category, tuple(messages), tuple(followups))


def _is_message(value: Any) -> bool:
    texts = [value.get("role"), value.get("content")] if isinstance(value, dict) else [None]
    return all(isinstance(text, str) for text in texts)


def encode_prompt(messages: Sequence[Message], template: ChatTemplate, tokenizer: Any) -> list[int]:
    """Token ids up to where the assistant's answer begins."""
    try:
        text = template.render(messages, prompt=True)
        text.encode()  # tokenizers reject lone surrogates, which JSON allows
    except BadRow as bad:
        raise BadInput(f"the chat template refuses a prompt ({bad})") from None
    except UnicodeEncodeError:
        raise BadInput(f"a prompt is not UTF-8 text: {messages[-1]['content'][:40]!r}") from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
