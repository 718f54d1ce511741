"""A real vLLM server, started by `fledge serve --run`: what it counts is what our replay says.

Greedily the text is known beforehand. At a temperature the server draws it; still the replay of
that very text says which drafted tokens were accepted, exactly, because vLLM drafts greedily at
every temperature and treats the proposal as certain: it takes a drafted token with the target's
probability, and a token that replaces a rejected one is drawn from all others. So a drafted token
was accepted if and only if the text goes on with it.

vLLM counts what it has verified, also past the last token that was asked for. Texts are therefore
known a round further than they are asked for: greedily from the target, at a temperature from a
longer request with the same seed. (On a CPU, vLLM 0.32 itself loses the temperature, so these
servers run with `mended_sampling`; the last test says when it can go.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from engines.cases import VOCABULARY, engine_target, greedy_texts, saved
from engines.vllm.server import Server, serving
from engines.vllm.test_vllm_export import ANSWER, DEPTHS, PROMPT, Trained, fitted
from fledge.bench.server import Load, measure_server
from fledge.decode.rounds import walk_rounds
from fledge.measure.replay import Text, replay

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LONGER = ANSWER + DEPTHS + 1
PROMPTS = 12
TEMPERATURE = 0.1  # low enough that drafts for a random model are taken now and then
_COUNTED = "vllm:spec_decode_num"
_PER_DEPTH = f"{_COUNTED}_accepted_tokens_per_pos"
_FIRST_TWO = (f"{_PER_DEPTH}:0", f"{_PER_DEPTH}:1")


@dataclass(frozen=True)
class Running:
    server: Server
    made: Trained
    texts: list[list[int]]  # prompts and the target's greedy answers

    @property
    def prompts(self) -> list[list[int]]:
        return [text[:PROMPT] for text in self.texts]


@pytest.fixture(scope="module", params=["eagle3", "p-eagle"])
def running(request: Any, engines: Any, tmp_path_factory: Any) -> Iterator[Running]:
    engines.close()
    root: Path = tmp_path_factory.mktemp("server")
    model = engine_target("llama")
    saved(model, root / "tiny-llama")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(root / "tiny-llama")
    made = fitted(request.param, root / "draft", root / "tiny-llama")
    texts = greedy_texts(model, count=PROMPTS, prompt=PROMPT, answer=LONGER)  # 8 that it has seen
    flags = ["--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager"]
    flags += ["--per-request-spec-decode-metrics", "detailed"]
    with serving(made.export("vllm"), *flags) as server:
        yield Running(server, made, texts.tolist())


def rounds_of(
    made: Trained, texts: Sequence[Sequence[int]], new_tokens: int = ANSWER
) -> list[list[tuple[int, int]]]:
    """By our replay, until so many tokens are there: of every round, how many drafted tokens were
    verified as right, also past the end, and how many tokens it added."""
    known = [Text(text[:PROMPT], text[PROMPT:]) for text in texts]
    return [
        [
            (one.accepted_T[walked.context - 2], walked.emitted)
            for walked in walk_rounds(one.accepted_T, prompt=PROMPT, total=PROMPT + new_tokens)
        ]
        for one in replay(made.target, made.draft, known, num_draft_tokens=DEPTHS)
    ]


def assert_counted(
    running: Running, texts: Sequence[Sequence[int]], *, concurrency: int, temperature: float
) -> None:
    """As many prompts as run at a time are one group: /metrics grows by their rounds, which every
    reply lists as well."""
    expected = [[right for right, _ in one] for one in rounds_of(running.made, texts)]
    for first in range(0, len(texts), concurrency):
        group = slice(first, first + concurrency)
        finished = running.server.finished()
        before = running.server.counters(finished)
        replies = running.server.ask_all(
            range(len(texts))[group], running.prompts[group], new_tokens=ANSWER,
            temperature=temperature,
        )  # fmt: skip
        after = running.server.counters(finished + concurrency)
        assert [reply.tokens for reply in replies] == [
            text[PROMPT : PROMPT + ANSWER] for text in texts[group]
        ]
        assert [reply.accepted for reply in replies] == expected[group]
        rounds = [accepted for one in expected[group] for accepted in one]
        assert [n for reply in replies for n in reply.drafted] == [DEPTHS] * len(rounds)
        growth = {name: after[name] - before[name] for name in after if name.startswith(_COUNTED)}
        assert growth == counted(rounds)
    every = counted([accepted for one in expected for accepted in one])
    drafts, *accepted = (every[name] for name in (f"{_COUNTED}_drafts", *_FIRST_TWO))
    assert 0 < accepted[1] < accepted[0] < drafts  # or nothing was tried out


def counted(rounds: list[int]) -> dict[str, float]:
    """vLLM's counters after such rounds."""
    by_depth = [sum(accepted > depth for accepted in rounds) for depth in range(DEPTHS)]
    return {
        f"{_COUNTED}_drafts": len(rounds),
        f"{_COUNTED}_draft_tokens": DEPTHS * len(rounds),
        f"{_COUNTED}_accepted_tokens": sum(rounds),
        **{f"{_PER_DEPTH}:{depth}": count for depth, count in enumerate(by_depth)},
    }


def test_clients_see_the_targets_name(running: Running) -> None:
    assert running.server.model == "tiny-llama"
    assert any("dtype=torch.float32" in line for line in running.server.log)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_greedy(running: Running, concurrency: int) -> None:
    assert_counted(running, running.texts, concurrency=concurrency, temperature=0.0)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_at_a_temperature(running: Running, concurrency: int) -> None:
    prompts = running.prompts
    longer = running.server.ask_all(
        range(len(prompts)), prompts, new_tokens=LONGER, temperature=TEMPERATURE
    )
    texts = [prompt + reply.tokens for prompt, reply in zip(prompts, longer, strict=True)]
    assert texts != running.texts
    assert_counted(running, texts, concurrency=concurrency, temperature=TEMPERATURE)


def test_bench_and_eval_count_the_last_round_as_they_say(running: Running) -> None:
    """Bench as vLLM: all that was verified. Replay, which `fledge eval` shows: what it added."""
    ended = running.made.target.model.config.eos_token_id
    texts = [text for text in running.texts if ended not in text[PROMPT : PROMPT + ANSWER]]
    by_length = {
        n: [one for text in rounds_of(running.made, texts, n) for one in text]
        for n in range(ANSWER // 2, ANSWER)
    }

    def cut_off(n: int) -> int:
        return sum(right + 1 - added for right, added in by_length[n])

    most = max(by_length, key=cut_off)  # answers whose end cuts off as much as possible
    rounds = by_length[most]
    asked = [[{"role": "user", "content": " ".join(f"w{i}" for i in t[:PROMPT])}] for t in texts]
    load = Load(asked, requests=len(asked), concurrency=4, max_tokens=most)
    found = measure_server(running.server.url, load)
    assert found.tokens == most * len(texts)
    assert found.acceptance is not None
    assert found.acceptance.drafts == len(rounds)
    assert found.acceptance.length == 1 + sum(right for right, _ in rounds) / len(rounds)
    as_asked = [Text(text[:PROMPT], text[PROMPT : PROMPT + most]) for text in texts]
    replayed = replay(running.made.target, running.made.draft, as_asked, num_draft_tokens=DEPTHS)
    assert [one.emitted for text in replayed for one in text.rounds] == [n for _, n in rounds]
    assert cut_off(most) > 0


def test_the_defect_that_is_mended_is_there() -> None:
    """If this fails, vLLM has mended it: `mended_sampling` and the warning of `fledge serve` go."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperature_N = torch.full((4,), -1.0)
    _expand_kernel_impl(temperature_N, torch.tensor([0.4]), torch.tensor([4]), 0, 1)
    assert temperature_N.tolist() == [-1.0] * 4
