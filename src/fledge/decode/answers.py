"""The target's own greedy answers: made once, kept by fingerprint of everything they depend on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fledge.data.conversation import Message
from fledge.data.template import ChatTemplate
from fledge.decode.prompts import Prompt, encode_prompt
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Finish, Stops
from fledge.errors import BadInput
from fledge.files import atomic_file, cache_dir
from fledge.target.hf import HFEagle3TargetModel
from fledge.target.layers import longest_text

Watch = Callable[[float, int], None]  # answers done (parts count), answers in all


@dataclass(frozen=True)
class Answered:
    """One turn that the target answered."""

    name: str
    group: str
    category: str
    turn: int
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: Finish
    question: str = ""  # the user's last words


@dataclass(frozen=True)
class Answers:
    turns: list[Answered]
    skipped: int  # prompts that leave no room for an answer
    from_cache: bool
    path: Path


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))


def cached_answers(
    target: HFEagle3TargetModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch: int = 16,
    on_answer: Watch | None = None,
) -> Answers:
    """The answers from the cache, or generated now and kept there."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
    path = cache_dir() / "answers" / f"{_key(target, prompts, max_new_tokens)}.json"
    if path.is_file():
        held = json.loads(path.read_bytes())
        turns = [Answered(**turn) for turn in held["turns"]]
        return Answers(turns, held["skipped"], True, path)
    writer = _Writer(target, tokenizer, max_new_tokens, batch)
    turns, skipped = writer.answer(prompts, on_answer)
    with atomic_file(path) as handle:
        value = {"skipped": skipped, "turns": [asdict(turn) for turn in turns]}
        handle.write(json.dumps(value).encode())
    return Answers(turns, skipped, False, path)


def _key(target: HFEagle3TargetModel, prompts: Sequence[Prompt], max_new_tokens: int) -> str:
    info = target.info()
    config: Any = target.model.config
    facts = {
        "version": 3,
        "weights": info.weights_fingerprint,
        "tokenizer": info.tokenizer_fingerprint,
        "config": {k: v for k, v in config.to_dict().items() if k != "_name_or_path"},
        "eos": sorted(eos_token_ids(target.model, target.tokenizer)),
        "dtype": str(info.dtype),
        "max_new_tokens": max_new_tokens,
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class _Writer:
    def __init__(
        self, target: HFEagle3TargetModel, tokenizer: Any, max_new_tokens: int, batch: int
    ) -> None:
        self._tokenizer, self._batch = tokenizer, batch
        self._template = ChatTemplate.of(tokenizer)
        self._decoder = SpeculativeDecoder(target.model)  # no draft: the target alone
        self._stops = Stops(max_new_tokens, eos_token_ids(target.model, tokenizer))
        self._room = longest_text(target.model.config)

    def answer(
        self, prompts: Sequence[Prompt], on_answer: Watch | None
    ) -> tuple[list[Answered], int]:
        """Turn after turn: a follow-up is asked when what goes before it is answered."""
        turns: list[Answered] = []
        skipped = number = 0
        total = sum(1 + len(prompt.followups) for prompt in prompts)
        asked = [(prompt, list(prompt.messages)) for prompt in prompts]
        while asked:
            encoded = [encode_prompt(said, self._template, self._tokenizer) for _, said in asked]
            fits = [len(ids) + self._stops.max_new_tokens <= self._room for ids in encoded]
            skipped += fits.count(False)
            asked = [one for one, room in zip(asked, fits, strict=True) if room]
            encoded = [one for one, room in zip(encoded, fits, strict=True) if room]
            before = len(turns)

            def watch(done: float, before: int = before) -> None:
                if on_answer is not None:
                    on_answer(before + done, total)

            for (prompt, said), one in zip(asked, self._generate(encoded, watch), strict=True):
                assert one.finish is not None
                turns.append(
                    Answered(
                        prompt.name, prompt.group, prompt.category, number,
                        one.prompt_ids, one.token_ids, one.finish, said[-1]["content"],
                    )
                )  # fmt: skip
            asked = [
                self._next(prompt, said, answered, number)
                for (prompt, said), answered in zip(asked, turns[before:], strict=True)
                if number < len(prompt.followups)
            ]
            number += 1
        return turns, skipped

    def _generate(
        self, encoded: list[list[int]], watch: Callable[[float], None]
    ) -> list[Generation]:
        """Continue prompts, those of similar length together."""
        found: dict[int, Generation] = {}
        limit = self._stops.max_new_tokens
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        for begin in range(0, len(order), self._batch):
            members = order[begin : begin + self._batch]

            def on_round(rows: list[Generation], begin: int = begin) -> None:
                watch(begin + sum(1 if row.finish else len(row.token_ids) / limit for row in rows))

            out = self._decoder.generate(
                [encoded[i] for i in members], self._stops, on_round=on_round
            )
            found |= dict(zip(members, out, strict=True))
        return [found[i] for i in range(len(encoded))]

    def _next(
        self, prompt: Prompt, said: list[Message], answered: Answered, number: int
    ) -> tuple[Prompt, list[Message]]:
        reply = self._tokenizer.decode(answered.answer_ids, skip_special_tokens=True)
        follow = {"role": "user", "content": prompt.followups[number]}
        return prompt, [*said, {"role": "assistant", "content": reply}, follow]
