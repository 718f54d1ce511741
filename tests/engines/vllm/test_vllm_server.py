"""A real vLLM server, started by `fledge serve --run`: what it counts is what our replay says.

Greedily the text is known beforehand. At a temperature the server draws it; still the replay of
that very text says which drafted tokens were accepted, exactly, because vLLM drafts greedily at
every temperature and treats the proposal as certain: it takes a drafted token with the target's
probability, and a token that replaces a rejected one is drawn from all others. So a drafted token
was accepted if and only if the text goes on with it.

vLLM counts what it has verified, also past the last token that was asked for. Texts are therefore
known a round further than they are asked for: greedily from the target, at a temperature from a
longer request with the same seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from engines.cases import VOCABULARY, engine_target, greedy_texts, saved
from engines.vllm.server import Reply, Server, serving
from engines.vllm.test_vllm_export import ANSWER, DEPTHS, PROMPT, Trained, fitted
from fledge.decode.rounds import walk_rounds
from fledge.measure.replay import Text, replay

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LONGER = ANSWER + DEPTHS + 1
PROMPTS = 12
_COUNTED = "vllm:spec_decode_num"


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
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / "tiny-llama")
    made = fitted(request.param, root / "draft", root / "tiny-llama")
    new = greedy_texts(model, count=PROMPTS - len(made.texts), prompt=PROMPT, answer=LONGER, seed=9)
    flags = ["--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager"]
    flags += ["--per-request-spec-decode-metrics", "detailed"]
    with serving(made.export("vllm"), *flags) as server:
        yield Running(server, made, [*made.texts, *new.tolist()])


def accepted_by_replay(made: Trained, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each round until `ANSWER` tokens are there, as far as it was verified."""
    known = [Text(text[:PROMPT], text[PROMPT:]) for text in texts]
    return [
        [
            one.accepted_T[walked.context - 2]
            for walked in walk_rounds(one.accepted_T, prompt=PROMPT, total=PROMPT + ANSWER)
        ]
        for one in replay(made.target, made.draft, known, num_draft_tokens=DEPTHS)
    ]


def assert_counted(
    growth: dict[str, float], replies: Sequence[Reply], expected: list[list[int]]
) -> None:
    """Round by round for every prompt, and /metrics over all of them."""
    assert [reply.accepted for reply in replies] == expected
    rounds = [accepted for one in expected for accepted in one]
    assert [drafted for reply in replies for drafted in reply.drafted] == [DEPTHS] * len(rounds)
    by_depth = [sum(accepted > depth for accepted in rounds) for depth in range(DEPTHS)]
    assert growth == {
        f"{_COUNTED}_drafts": len(rounds),
        f"{_COUNTED}_draft_tokens": DEPTHS * len(rounds),
        f"{_COUNTED}_accepted_tokens": sum(rounds),
        **{f"{_COUNTED}_accepted_tokens_per_pos:{k}": n for k, n in enumerate(by_depth)},
    }
    assert 0 < by_depth[1] < by_depth[0] < len(rounds)  # or nothing was tried out


def asked(
    server: Server, prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[list[Reply], dict[str, float]]:
    """The replies to all prompts, and how vLLM's counters have grown by them."""
    before = server.finished()
    start = server.counters(before)
    replies = server.ask_all(prompts, **options)
    end = server.counters(before + len(prompts))
    names = [name for name in end if name.startswith(_COUNTED) and "created" not in name]
    return replies, {name: end[name] - start.get(name, 0.0) for name in names}


def test_clients_see_the_targets_name(running: Running) -> None:
    assert running.server.model == "tiny-llama"
    assert any("dtype=torch.float32" in line for line in running.server.log)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_greedy(running: Running, concurrency: int) -> None:
    replies, growth = asked(
        running.server, running.prompts, concurrency=concurrency, new_tokens=ANSWER, temperature=0.0
    )
    assert [reply.tokens for reply in replies] == [
        text[PROMPT : PROMPT + ANSWER] for text in running.texts
    ]
    assert_counted(growth, replies, accepted_by_replay(running.made, running.texts))


def test_greedy_prompt_by_prompt_in_metrics(running: Running) -> None:
    """One at a time, /metrics itself can be read for every prompt."""
    expected = accepted_by_replay(running.made, running.texts)
    for prompt, rounds in zip(running.prompts, expected, strict=True):
        _, growth = asked(
            running.server, [prompt], concurrency=1, new_tokens=ANSWER, temperature=0.0
        )
        assert growth[f"{_COUNTED}_drafts"] == len(rounds)
        assert growth[f"{_COUNTED}_accepted_tokens"] == sum(rounds)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_at_a_temperature(running: Running, concurrency: int) -> None:
    sampled = {"concurrency": concurrency, "temperature": 0.7}
    longer = running.server.ask_all(running.prompts, new_tokens=LONGER, **sampled)
    replies, growth = asked(running.server, running.prompts, new_tokens=ANSWER, **sampled)
    assert [reply.tokens for reply in replies] == [reply.tokens[:ANSWER] for reply in longer]
    texts = [prompt + reply.tokens for prompt, reply in zip(running.prompts, longer, strict=True)]
    assert texts != running.texts
    assert_counted(growth, replies, accepted_by_replay(running.made, texts))
