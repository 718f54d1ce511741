"""The target's own greedy answers: generated once, cached by a fingerprint of all they depend on.

answers/KEY.json     all of them
answers/KEY.part     the finished ones while others are not: a killed command loses only the batch
                     in progress
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock

from fledge.core.errors import BadInput, nearest
from fledge.core.files import atomic_file, cache_dir
from fledge.core.progress import Watch, unwatched
from fledge.core.reading import Choice, ListOf, Table, Text, Whole, read_json
from fledge.data import journal
from fledge.data.conversation import Message
from fledge.data.drops import BadRow
from fledge.data.sources import make_parts
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Finish, Stops, eos_token_ids
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import longest_text

# --- prompts -------------------------------------------------------------------------------------
# The prompts that a draft is evaluated on: from files, or the set that ships with the project.


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
    row = row if isinstance(row, dict) else {}
    messages, followups = row.get("messages"), row.get("followups") or []
    if isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise BadInput("no messages in this row", where=place, fix=fix)
    while messages and messages[-1]["role"] == "assistant":  # the target gives its own answer
        messages = messages[:-1]
    if not messages:
        raise BadInput("nothing to answer in this row", where=place, fix=fix)
    if not isinstance(followups, list) or not all(isinstance(text, str) for text in followups):
        raise BadInput("followups must be texts", where=place)
    name, category = str(row.get("id", place)), str(row.get("category") or group)
    return Prompt(name, group, category, tuple(messages), tuple(followups))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(value.get(name), str) for name in ("role", "content"))


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


# --- answers --------------------------------------------------------------------------------------


_IDS, _FINISH = ListOf(Whole(0, 2**31), most=2**31), Choice(get_args(Finish))
_TURN = Table(
    {
        **dict.fromkeys(("name", "group", "category"), Text(2**24)),
        **dict.fromkeys(("prompt_ids", "answer_ids"), _IDS),
        "turn": Whole(),
        "finish": _FINISH,
        "question": Text(2**28),
    }
)
_ANSWERS = Table({"skipped": Whole(), "turns": ListOf(_TURN, most=2**31)})


@dataclass(frozen=True)
class AnsweredTurn:
    """One turn that the target answered."""

    name: str
    group: str
    category: str
    turn: int
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: Finish
    question: str = ""  # the user's last message


@dataclass(frozen=True)
class Answers:
    turns: list[AnsweredTurn]
    skipped: int  # prompts that leave no room for an answer
    from_cache: bool
    path: Path


def cached_answers(
    target: HFEagle3TargetModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch: int = 16,
    watch: Watch = unwatched,
) -> Answers:
    """The answers from the cache, or generated now and cached."""
    if target.tokenizer is None:
        raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
    stops = Stops(max_new_tokens, eos_token_ids(target.model, target.tokenizer))

    def answer() -> dict[str, Any]:
        part = path.with_suffix(".part")
        turns, skipped = _answer(target, prompts, stops, batch, part, watch)
        return {"skipped": skipped, "turns": turns}

    path = _path(target, [asdict(prompt) for prompt in prompts], max_new_tokens)
    value, from_cache = _cached(path, _ANSWERS, answer)
    names = AnsweredTurn.__dataclass_fields__
    turns = [AnsweredTurn(**{name: turn[name] for name in names}) for turn in value["turns"]]
    return Answers(turns, value["skipped"], from_cache, path)


def _text(text: Generation) -> dict[str, Any]:
    return {"token_ids": text.token_ids, "finish": text.finish}


def _cached(path: Path, expected: Table, make: Callable[[], Any]) -> tuple[Any, bool]:
    """The file's value, or what is made now and written there; and whether the file was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # a second command waits, then reads
        if from_cache := path.is_file():
            what, fix = "the file of answers", "remove it: they are made again"
            value = read_json(path, expected, what=what, fix=fix)
        else:
            value = make()
            with atomic_file(path) as handle:
                handle.write(json.dumps(value).encode())
        path.with_suffix(".part").unlink(missing_ok=True)  # also what a killed command left
    return value, from_cache


def _path(target: HFEagle3TargetModel, prompts: Sequence[Any], max_new_tokens: int) -> Path:
    """Named by a hash of everything that changes an answer. The batch size does not count: like the
    machine, it changes only rounding."""
    info = target.info()
    model: Any = target.model
    config = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):  # they do not change the model
        config.pop(name, None)
    key = {
        "version": 3,
        "weights": info.weights_fingerprint,
        "config": config,  # rotary angles, scales, the longest text
        "ends": sorted(eos_token_ids(model, target.tokenizer)) if target.tokenizer else [],
        "tokenizer": info.tokenizer_fingerprint,
        "dtype": str(info.dtype),
        "max_new_tokens": max_new_tokens,
        "prompts": list(prompts),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "answers" / f"{digest[:24]}.json"


def _answer(
    target: HFEagle3TargetModel,
    prompts: Sequence[Prompt],
    stops: Stops,
    batch: int,
    part: Path,
    watch: Watch,
) -> tuple[list[dict[str, Any]], int]:
    """The answered turns, as `AnsweredTurn` has them, and the number skipped. A follow-up is asked
    once all turns before it are answered; prompts of similar length are answered together. Answers
    that are in the journal `part` are taken from there, and new ones are added to it."""
    done = {line["row"]: line for _, line in journal.read(part)}
    tokenizer, template = target.tokenizer, ChatTemplate.of(target.tokenizer)
    decoder = SpeculativeDecoder(target.model)  # no draft: the target alone
    most = longest_text(target.model.config) - stops.max_new_tokens
    turns: list[dict[str, Any]] = []
    skipped = number = 0
    total = sum(1 + len(prompt.followups) for prompt in prompts)
    chats = {row: list(prompt.messages) for row, prompt in enumerate(prompts)}
    while chats:
        encoded = {row: encode_prompt(chats[row], template, tokenizer) for row in chats}
        order = [row for row in sorted(encoded, key=lambda row: len(encoded[row]))
                 if len(encoded[row]) <= most]  # fmt: skip
        skipped += len(encoded) - len(order)
        texts: dict[int, Generation] = {}
        for begin in range(0, len(order), batch):
            rows = order[begin : begin + batch]

            def on_round(running: list[Generation], before: int = len(turns) + begin) -> None:
                limit = stops.max_new_tokens  # parts of answers count
                shares = (1 if text.finish else len(text.token_ids) / limit for text in running)
                watch("the target answers", before + sum(shares), total)

            names = [number * len(prompts) + row for row in rows]
            # all of a batch or none of it: numbers round differently in another batch
            if not done.keys() >= {*names}:
                asked = [encoded[row] for row in rows]
                generated = decoder.generate(asked, stops, on_round=on_round)
                for name, text in zip(names, generated, strict=True):
                    done[name] = _text(text)
                    journal.append(part, {"row": name, **done[name]})
            for row, name in zip(rows, names, strict=True):
                known = done[name]
                texts[row] = Generation(encoded[row], known["token_ids"], known["finish"])
        following = {}
        for row in sorted(texts):
            prompt, messages, text = prompts[row], chats[row], texts[row]
            turns.append({
                "name": prompt.name, "group": prompt.group, "category": prompt.category,
                "turn": number, "prompt_ids": text.prompt_ids, "answer_ids": text.token_ids,
                "finish": text.finish, "question": messages[-1]["content"],
            })  # fmt: skip
            if number < len(prompt.followups):
                reply = tokenizer.decode(text.token_ids, skip_special_tokens=True)
                question = {"role": "user", "content": prompt.followups[number]}
                following[row] = [*messages, {"role": "assistant", "content": reply}, question]
        chats, number = following, number + 1
    return turns, skipped
