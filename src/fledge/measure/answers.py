"""The target's own greedy answers: generated once, cached by a fingerprint of all they depend on.

answers/KEY.json     all of them
answers/KEY.part     the finished ones while others are not: a killed command loses only the batch
                     in progress
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
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


# --- answers --------------------------------------------------------------------------------------


_IDS, _FINISH = ListOf(Whole(0, 2**31), most=2**31), Choice(get_args(Finish))
_ANSWER = Table({"token_ids": _IDS, "finish": _FINISH})
_CACHED = Table(
    {
        "skipped": Whole(),
        "turns": ListOf(
            Table(
                {
                    **dict.fromkeys(("name", "group", "category"), Text(2**24)),
                    "turn": Whole(),
                    "prompt_ids": _IDS,
                    "answer_ids": _IDS,
                    "finish": _FINISH,
                    "question": Text(2**28),
                },
            ),
            most=2**31,
        ),
    }
)


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
    prompts_json = [asdict(prompt) for prompt in prompts]
    path = cache_dir() / "answers" / f"{_key(target, prompts_json, max_new_tokens)}.json"
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # a second command waits, then reads
        if path.is_file():
            return _read_answers(path, part)
        writer = _Writer(target, max_new_tokens, batch, part)
        turns, skipped = writer.answer(prompts, watch)
        with atomic_file(path) as handle:
            value = {"skipped": skipped, "turns": [asdict(turn) for turn in turns]}
            handle.write(json.dumps(value).encode())
        part.unlink(missing_ok=True)
    return Answers(turns, skipped, False, path)


def _read_answers(path: Path, part: Path) -> Answers:
    part.unlink(missing_ok=True)  # left over if the writer was killed before removal
    cached = _read(path, _CACHED)
    names = [field.name for field in fields(AnsweredTurn)]
    turns = [AnsweredTurn(**{name: turn[name] for name in names}) for turn in cached["turns"]]
    return Answers(turns, cached["skipped"], True, path)


def _read(path: Path, expected: Table) -> Any:
    what, fix = "the file of answers", "remove it: they are made again"
    return read_json(path, expected, what=what, fix=fix, max_bytes=1 << 30)


def cached_continuations(
    target: HFEagle3TargetModel, prompts: list[list[int]], stops: Stops
) -> list[Generation]:
    """The target's greedy continuations of token ids, from the cache or generated now and cached:
    drafts of one target, and exports for several engines, are checked on the same ones."""
    path = cache_dir() / "answers" / f"{_key(target, prompts, stops.max_new_tokens)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            count = len(prompts)
            expected = Table({"continuations": ListOf(_ANSWER, least=count, most=count)})
            cached = _read(path, expected)["continuations"]
            pairs = zip(prompts, cached, strict=True)
            return [Generation(ids, value["token_ids"], value["finish"]) for ids, value in pairs]
        texts = SpeculativeDecoder(target.model).generate(prompts, stops)
        with atomic_file(path) as handle:
            values = [{"token_ids": text.token_ids, "finish": text.finish} for text in texts]
            handle.write(json.dumps({"continuations": values}).encode())
    return texts


def _key(target: HFEagle3TargetModel, prompts: Sequence[Any], max_new_tokens: int) -> str:
    """A hash of everything that changes an answer. The batch size does not count: like the machine,
    it changes only rounding."""
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
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


class _Writer:
    """Generates the answers that are not in the file `part` yet, and adds them to it."""

    def __init__(
        self, target: HFEagle3TargetModel, max_new_tokens: int, batch: int, part: Path
    ) -> None:
        self._tokenizer, self._batch, self._part = target.tokenizer, batch, part
        records = journal.read(part, {True: _ANSWER, False: _ANSWER})
        self._done = {record["row"]: record for *_, record in records}
        self._template = ChatTemplate.of(self._tokenizer)
        self._decoder = SpeculativeDecoder(target.model)  # no draft: the target alone
        self._stops = Stops(max_new_tokens, eos_token_ids(target.model, self._tokenizer))
        self._longest = longest_text(target.model.config)

    def answer(self, prompts: Sequence[Prompt], watch: Watch) -> tuple[list[AnsweredTurn], int]:
        """The answered turns and the number skipped. A follow-up is asked once all turns before it
        are answered."""
        turns: list[AnsweredTurn] = []
        skipped = number = 0
        total = sum(1 + len(prompt.followups) for prompt in prompts)
        chats = {row: list(prompt.messages) for row, prompt in enumerate(prompts)}
        while chats:
            encoded = {
                row: encode_prompt(messages, self._template, self._tokenizer)
                for row, messages in chats.items()
            }
            most = self._longest - self._stops.max_new_tokens
            fitting = {row: ids for row, ids in encoded.items() if len(ids) <= most}
            skipped += len(encoded) - len(fitting)

            def on_done(done: float, before: int = len(turns)) -> None:  # parts of answers count
                watch("the target answers", before + done, total)

            following = {}
            for row, answer in self._generate(fitting, number * len(prompts), on_done).items():
                assert answer.finish is not None
                prompt, messages = prompts[row], chats[row]
                turns.append(
                    AnsweredTurn(
                        prompt.name, prompt.group, prompt.category, number,
                        answer.prompt_ids, answer.token_ids, answer.finish, messages[-1]["content"],
                    )
                )  # fmt: skip
                if number < len(prompt.followups):
                    reply = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                    question = {"role": "user", "content": prompt.followups[number]}
                    following[row] = [*messages, {"role": "assistant", "content": reply}, question]
            chats, number = following, number + 1
        return turns, skipped

    def _generate(
        self, prompts: dict[int, list[int]], first_name: int, on_done: Callable[[float], None]
    ) -> dict[int, Generation]:
        """Continue prompts, by row, in batches of similar length. In the journal, a row has its
        number from `first_name` on."""
        texts: dict[int, Generation] = {}
        limit = self._stops.max_new_tokens
        order = sorted(prompts, key=lambda row: len(prompts[row]))
        for begin in range(0, len(order), self._batch):
            rows = order[begin : begin + self._batch]

            def on_round(batch: list[Generation], begin: int = begin) -> None:
                shares = (1 if text.finish else len(text.token_ids) / limit for text in batch)
                on_done(begin + sum(shares))

            names, encoded = [first_name + row for row in rows], [prompts[row] for row in rows]
            batch = self._known(names, encoded)
            if batch is None:
                batch = self._decoder.generate(encoded, self._stops, on_round=on_round)
                for name, text in zip(names, batch, strict=True):
                    value = {"token_ids": text.token_ids, "finish": text.finish}
                    journal.append(self._part, name, value, good=True)
            texts |= zip(rows, batch, strict=True)
        return {row: texts[row] for row in prompts}

    def _known(self, names: list[int], encoded: list[list[int]]) -> list[Generation] | None:
        """A batch whose answers are all known, else None: an incomplete batch is answered
        again as a whole, since numbers round differently in another batch."""
        if not all(name in self._done for name in names):
            return None
        entries = [self._done[name] for name in names]
        return [
            Generation(ids, entry["token_ids"], entry["finish"])
            for ids, entry in zip(encoded, entries, strict=True)
        ]
