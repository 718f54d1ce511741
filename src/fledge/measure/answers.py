"""The target's own greedy answers: generated once, cached by a fingerprint of all they depend on.

answers/KEY.json     all of them
answers/KEY.parts/   the finished ones while others are not: a killed command loses only the batch
                     in progress
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock

from fledge.core.errors import BadInput
from fledge.core.expected import Choice, ListOf, Table, Text, Whole
from fledge.core.files import atomic_file, cache_dir
from fledge.core.reading import read_json
from fledge.data.conversation import Message
from fledge.data.journal import Journal
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Finish, Stops, eos_token_ids
from fledge.measure.prompts import Prompt, encode_prompt
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import longest_text

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
                },
                optional={"question": Text(2**28)},
            ),
            most=2**31,
        ),
    }
)

Watch = Callable[[float, int], None]  # answers done (parts count), answers in all


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
    on_answer: Watch = lambda done, total: None,
) -> Answers:
    """The answers from the cache, or generated now and cached."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
    prompts_json = [asdict(prompt) for prompt in prompts]
    path = cache_dir() / "answers" / f"{_key(target, prompts_json, max_new_tokens)}.json"
    parts = path.with_suffix(".parts")
    if path.is_file():
        return _read_answers(path, parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # a second command waits, then reads
        if path.is_file():
            return _read_answers(path, parts)
        journal = Journal(parts, good=_ANSWER, failed=_ANSWER)
        try:
            writer = _Writer(target, tokenizer, max_new_tokens, batch, journal)
            turns, skipped = writer.answer(prompts, on_answer)
        finally:
            journal.close()
        with atomic_file(path) as handle:
            value = {"skipped": skipped, "turns": [asdict(turn) for turn in turns]}
            handle.write(json.dumps(value).encode())
        shutil.rmtree(parts)
    return Answers(turns, skipped, False, path)


def _read_answers(path: Path, parts: Path) -> Answers:
    shutil.rmtree(parts, ignore_errors=True)  # left over if the writer was killed before removal
    what, fix = "the file of answers", "remove it: they are made again"
    cached = read_json(path, _CACHED, what=what, fix=fix, max_bytes=1 << 30)
    names = [field.name for field in fields(AnsweredTurn)]
    turns = [AnsweredTurn(**{n: turn[n] for n in names if n in turn}) for turn in cached["turns"]]
    return Answers(turns, cached["skipped"], True, path)


def cached_continuations(
    target: HFEagle3TargetModel, prompts: list[list[int]], stops: Stops
) -> list[Generation]:
    """The target's greedy continuations of token ids, from the cache or generated now and cached:
    drafts of one target, and exports for several engines, are checked on the same ones."""
    path = cache_dir() / "answers" / f"{_key(target, prompts, stops.max_new_tokens)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            return _read_continuations(path, prompts)
        texts = SpeculativeDecoder(target.model).generate(prompts, stops)
        with atomic_file(path) as handle:
            values = [{"token_ids": text.token_ids, "finish": text.finish} for text in texts]
            handle.write(json.dumps({"continuations": values}).encode())
    return texts


def _read_continuations(path: Path, prompts: list[list[int]]) -> list[Generation]:
    count, fix = len(prompts), "remove it: they are made again"
    expected = Table({"continuations": ListOf(_ANSWER, least=count, most=count)})
    cached = read_json(path, expected, what="the file of answers", fix=fix, max_bytes=1 << 30)
    pairs = zip(prompts, cached["continuations"], strict=True)
    return [Generation(ids, value["token_ids"], value["finish"]) for ids, value in pairs]


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
    """Generates the answers that are not in the journal yet."""

    def __init__(
        self,
        target: HFEagle3TargetModel,
        tokenizer: Any,
        max_new_tokens: int,
        batch: int,
        journal: Journal,
    ) -> None:
        self._tokenizer, self._batch, self._journal = tokenizer, batch, journal
        self._template = ChatTemplate.of(tokenizer)
        self._decoder = SpeculativeDecoder(target.model)  # no draft: the target alone
        self._stops = Stops(max_new_tokens, eos_token_ids(target.model, tokenizer))
        self._room = longest_text(target.model.config)

    def answer(self, prompts: Sequence[Prompt], on_answer: Watch) -> tuple[list[AnsweredTurn], int]:
        """The answered turns and the number skipped. A follow-up is asked once all turns before it
        are answered."""
        turns: list[AnsweredTurn] = []
        skipped = number = 0
        total = sum(1 + len(prompt.followups) for prompt in prompts)
        chats = [(row, list(prompt.messages)) for row, prompt in enumerate(prompts)]
        while chats:
            encoded = [
                encode_prompt(messages, self._template, self._tokenizer) for _, messages in chats
            ]
            fits = [len(ids) + self._stops.max_new_tokens <= self._room for ids in encoded]
            skipped += fits.count(False)
            chats = list(itertools.compress(chats, fits))
            encoded = list(itertools.compress(encoded, fits))
            before = len(turns)

            def watch(done: float, before: int = before) -> None:
                on_answer(before + done, total)

            names = [number * len(prompts) + row for row, _ in chats]  # in the journal
            answers = self._generate(names, encoded, watch)
            for (row, messages), answer in zip(chats, answers, strict=True):
                assert answer.finish is not None
                prompt = prompts[row]
                turns.append(
                    AnsweredTurn(
                        prompt.name, prompt.group, prompt.category, number,
                        answer.prompt_ids, answer.token_ids, answer.finish, messages[-1]["content"],
                    )
                )  # fmt: skip
            chats = [
                (row, self._next(messages, turn, prompts[row].followups[number]))
                for (row, messages), turn in zip(chats, turns[before:], strict=True)
                if number < len(prompts[row].followups)
            ]
            number += 1
        return turns, skipped

    def _generate(
        self, names: list[int], encoded: list[list[int]], watch: Callable[[float], None]
    ) -> list[Generation]:
        """Continue prompts in batches of similar length."""
        texts: dict[int, Generation] = {}
        limit = self._stops.max_new_tokens
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        for begin in range(0, len(order), self._batch):
            members = order[begin : begin + self._batch]

            def on_round(rows: list[Generation], begin: int = begin) -> None:
                watch(begin + sum(1 if row.finish else len(row.token_ids) / limit for row in rows))

            batch_ids = [encoded[i] for i in members]
            batch = self._from_journal([names[i] for i in members], batch_ids)
            if batch is None:
                batch = self._decoder.generate(batch_ids, self._stops, on_round=on_round)
                for i, text in zip(members, batch, strict=True):
                    value = {"token_ids": text.token_ids, "finish": text.finish}
                    self._journal.add(names[i], value, good=True)
            texts |= dict(zip(members, batch, strict=True))
        return [texts[i] for i in range(len(encoded))]

    def _from_journal(self, names: list[int], encoded: list[list[int]]) -> list[Generation] | None:
        """A batch whose answers are all in the journal, else None: an incomplete batch is answered
        again as a whole, since numbers round differently in another batch."""
        if not all(name in self._journal.entries for name in names):
            return None
        entries = [self._journal.entries[name].read() for name in names]
        return [
            Generation(ids, entry["token_ids"], entry["finish"])
            for ids, entry in zip(encoded, entries, strict=True)
        ]

    def _next(self, messages: list[Message], turn: AnsweredTurn, follow: str) -> list[Message]:
        reply = self._tokenizer.decode(turn.answer_ids, skip_special_tokens=True)
        answer = {"role": "assistant", "content": reply}
        return [*messages, answer, {"role": "user", "content": follow}]
