"""A real vLLM server, started by `fledge serve --run`: its counters equal those of our replay.

Under greedy decoding the text is known in advance. At a temperature the server samples it; yet
replaying that very text tells exactly which drafted tokens were accepted, because vLLM drafts
greedily at every temperature and treats the proposal as certain: it accepts a drafted token with
the target's probability, and a token that replaces a rejected one is drawn from all others. So a
drafted token was accepted if and only if the text continues with it.

vLLM counts what it has verified, even past the last requested token. The texts are therefore known
one round beyond the requested length: from the target under greedy decoding, from a longer request
with the same seed at a temperature. (On a CPU, vLLM 0.32 itself loses the temperature, so these
servers run with `mended_sampling`; the last test tells when it can go.)
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
from fledge.decode.accept import walk_rounds
from fledge.measure.replay import Text, replay

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LONGER = ANSWER + DEPTHS + 1
PROMPTS = 12
TEMPERATURE = 0.1  # low enough that drafts for a random model are sometimes accepted
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
    texts = greedy_texts(model, count=PROMPTS, prompt=PROMPT, answer=LONGER)  # 8 seen in training
    flags = ["--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager"]
    flags += ["--per-request-spec-decode-metrics", "detailed"]
    with serving(made.export("vllm"), root / "tiny-llama", *flags) as server:
        yield Running(server, made, texts.tolist())


def rounds_of(
    made: Trained, texts: Sequence[Sequence[int]], new_tokens: int = ANSWER
) -> list[list[tuple[int, int]]]:
    """Every round of our replay until `new_tokens` are generated: how many drafted tokens were
    verified as right, even past the end, and how many tokens the round added."""
    known = [Text(text[:PROMPT], text[PROMPT:]) for text in texts]
    return [
        [
            (result.accepted_T[walked.context - 2], walked.emitted)
            for walked in walk_rounds(result.accepted_T, prompt=PROMPT, total=PROMPT + new_tokens)
        ]
        for result in replay(made.target, made.draft, known, num_draft_tokens=DEPTHS)
    ]


def assert_counted(
    running: Running, texts: Sequence[Sequence[int]], *, concurrency: int, temperature: float
) -> None:
    """Send the prompts in groups of `concurrency`: /metrics grows by the rounds of a group, and
    each reply lists its own."""
    expected = [[right for right, _ in walked] for walked in rounds_of(running.made, texts)]
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
        rounds = [accepted for walked in expected[group] for accepted in walked]
        assert [n for reply in replies for n in reply.drafted] == [DEPTHS] * len(rounds)
        growth = {name: after[name] - before[name] for name in after if name.startswith(_COUNTED)}
        assert growth == counted(rounds)
    total = counted([accepted for walked in expected for accepted in walked])
    drafts, *accepted = (total[name] for name in (f"{_COUNTED}_drafts", *_FIRST_TWO))
    assert 0 < accepted[1] < accepted[0] < drafts  # otherwise nothing was tested


def counted(rounds: list[int]) -> dict[str, float]:
    """vLLM's counters after these rounds."""
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


def test_bench_and_eval_count_the_last_round_as_documented(running: Running) -> None:
    """Bench counts all verified tokens, as vLLM does; replay (`fledge eval`) counts those added."""
    eos_id = running.made.target.model.config.eos_token_id
    texts = [text for text in running.texts if eos_id not in text[PROMPT : PROMPT + ANSWER]]
    by_length = {
        n: [counts for text in rounds_of(running.made, texts, n) for counts in text]
        for n in range(ANSWER // 2, ANSWER)
    }

    def cut_off(n: int) -> int:
        return sum(right + 1 - added for right, added in by_length[n])

    length = max(by_length, key=cut_off)  # its end cuts off the most tokens
    rounds = by_length[length]
    chats = [[{"role": "user", "content": " ".join(f"w{i}" for i in t[:PROMPT])}] for t in texts]
    load = Load(chats, requests=len(chats), concurrency=4, max_tokens=length)
    measured = measure_server(running.server.url, load)
    assert measured.tokens == length * len(texts)
    assert measured.acceptance is not None
    assert measured.acceptance.drafts == len(rounds)
    assert measured.acceptance.length == 1 + sum(right for right, _ in rounds) / len(rounds)
    known = [Text(text[:PROMPT], text[PROMPT : PROMPT + length]) for text in texts]
    replayed = replay(running.made.target, running.made.draft, known, num_draft_tokens=DEPTHS)
    assert [walked.emitted for text in replayed for walked in text.rounds] == [n for _, n in rounds]
    assert cut_off(length) > 0


def test_the_defect_that_mended_sampling_fixes_still_exists() -> None:
    """If this fails, vLLM has fixed it: drop `mended_sampling` and `fledge serve`'s warning."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperature_N = torch.full((4,), -1.0)
    _expand_kernel_impl(temperature_N, torch.tensor([0.4]), torch.tensor([4]), 0, 1)
    assert temperature_N.tolist() == [-1.0] * 4
