"""Chats to train a draft on without anybody's data: the target asks itself, and answers.

    python tools/make_draft_chats.py --target smollm2-135m --out chats.jsonl --seconds 200 \
        --exclude eval_mt_bench.jsonl [--also answered.jsonl --without alpaca/]

Questions are what the target writes after the beginning of a user's turn, sampled at temperature 1;
its answers are greedy. A question that repeats, has no end, or shares eight words in a row with a
prompt of --exclude is left out. `--also` adds rows that are answered already, except those whose id
begins with a word of --without.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fledge.core.files import atomic_file
from fledge.core.machine import find_device
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.target.hf.loading import load_hf_model

MARK = "the question stands here"
OVERLAP = 8  # words in a row
LONGEST_QUESTION = 160  # tokens


class Asker:
    def __init__(self, target: str, device: str, answer_tokens: int) -> None:
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
        loaded = load_hf_model(target, dtype=dtype, device=device)
        self._tokenizer = loaded.tokenizer
        self._template = ChatTemplate.of(loaded.tokenizer)
        self._decoder = SpeculativeDecoder(loaded.model)
        self._eos = eos_token_ids(loaded.model, loaded.tokenizer)
        self._answer_tokens = answer_tokens
        turn = self._template.render([{"role": "user", "content": MARK}], None, prompt=True)
        self._before = self._encode(turn.partition(MARK)[0])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def questions(self, count: int, seed: int) -> list[str]:
        texts = self._decoder.generate(
            [self._before] * count, Stops(LONGEST_QUESTION, self._eos), temperature=1.0, seed=seed
        )
        decode = self._tokenizer.decode
        ended = [text.token_ids for text in texts if text.finish == "eos"]
        return [decode(ids, skip_special_tokens=True).strip() for ids in ended]

    def answers(self, questions: list[str]) -> Iterator[dict[str, Any]]:
        turns = [{"role": "user", "content": question} for question in questions]
        prompts = [self._encode(self._template.render([x], None, prompt=True)) for x in turns]
        texts = self._decoder.generate(prompts, Stops(self._answer_tokens, self._eos))
        for turn, text in zip(turns, texts, strict=True):
            answer = self._tokenizer.decode(text.token_ids, skip_special_tokens=True)
            finish = "length" if text.finish == "length" else "stop"
            messages = [turn, {"role": "assistant", "content": answer}]
            yield {"messages": messages, "finish": finish, "tokens": len(text.token_ids)}


def grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + OVERLAP]) for i in range(max(1, len(words) - OVERLAP + 1))}


def evaluation_grams(files: list[Path]) -> set[tuple[str, ...]]:
    texts = [str(value) for file in files for line in file.open()
             for value in _texts(json.loads(line))]  # fmt: skip
    return {gram for text in texts for gram in grams(text)}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--out", type=Path, required=True)
    add("--seconds", type=float, default=200, help="no batch is begun after them")
    add("--batch", type=int, default=512)
    add("--answer-tokens", type=int, default=320)
    add("--exclude", type=Path, nargs="*", default=[], help="prompts to judge the draft by")
    add("--also", type=Path, nargs="*", default=[], help="rows that are answered already")
    add("--without", nargs="*", default=[], help="beginnings of ids to leave out of them")
    args = parser.parse_args()
    asker = Asker(args.target, str(find_device()), args.answer_tokens)
    known, seen = evaluation_grams(args.exclude), set[str]()
    begin, made, tokens, left_out = time.monotonic(), 0, 0, 0
    waiting: list[str] = []
    with atomic_file(args.out) as out:
        for path in args.also:
            for line in path.open():
                if not json.loads(line)["id"].startswith(tuple(args.without)):
                    out.write(line.encode())
        seed = 0
        while time.monotonic() - begin < args.seconds:
            while len(waiting) < 4 * args.batch:
                for question in asker.questions(4 * args.batch, seed):
                    fresh = len(question.split()) > 2 and question not in seen
                    if fresh and not known & grams(question):
                        seen.add(question)
                        waiting.append(question)
                    else:
                        left_out += 1
                seed += 1
            waiting.sort(key=len)  # questions of one length ask for answers of similar lengths
            while waiting:
                for row in asker.answers(waiting[: args.batch]):
                    out.write(json.dumps({"id": f"self/{made}", **row}).encode() + b"\n")
                    made, tokens = made + 1, tokens + row["tokens"]
                del waiting[: args.batch]
                if time.monotonic() - begin > args.seconds:
                    break
            spent = time.monotonic() - begin
            print(
                f"{made:,} chats, {tokens:,} tokens, {spent:.0f} s, {left_out} left out", flush=True
            )


if __name__ == "__main__":
    main()
