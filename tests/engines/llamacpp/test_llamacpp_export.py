"""Exported drafts in a real llama.cpp: texts are the target's own, and every prompt takes the
rounds that replay counts. Target, draft and caches are in float32, so that both compute the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.llamacpp.drafts import (
    DEPTHS,
    KINDS,
    TARGET,
    counted,
    replayed,
    trained,
)
from engines.llamacpp.serving import ENVIRONMENT, serve
from fledge.data.template import ChatTemplate
from fledge.decode.llamacpp import Answer
from fledge.formats.export import export_draft
from fledge.formats.self_check import CheckOptions
from fledge.measure.answers import encode_prompt, read_prompts
from fledge.measure.replay import Replay, Text
from fledge.methods.registry import METHODS
from fledge.models.resolve import load_tokenizer
from fledge.target.hf.model import HFEagle3TargetModel
from gguf_target import target_gguf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="make test-llamacpp installs llama.cpp"),
]
PROMPTS, LIMIT, TRAINED = 24, 24, 6


@dataclass(frozen=True)
class Served:
    answers: list[Answer]
    rounds: int


@dataclass(frozen=True)
class Place:
    root: Path
    target: Path
    texts: list[Text]  # the target's own, longer than what is served
    end: int

    def serve(self, kind: str, file: Path, prompts: int = PROMPTS) -> Served:
        algorithm = METHODS[kind].algorithms["llama.cpp"]
        options = {"draft": str(file), "draft_tokens": DEPTHS, "algorithm": algorithm}
        with serve(target=str(self.target), **options) as server:
            answers = [server.complete(t.prompt_ids, LIMIT) for t in self.texts[:prompts]]
            rounds = server.counters()["spec_decode_num_drafts_total"]
            return Served(answers, int(rounds))

    def expected(self, text: Text) -> list[int]:
        answer = list(text.answer_ids[:LIMIT])
        return answer[: answer.index(self.end) + 1] if self.end in answer else answer


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Place:
    root = tmp_path_factory.mktemp("llamacpp")
    target = target_gguf(TARGET, root / "target.gguf")
    tokenizer = load_tokenizer(TARGET)
    template, end = ChatTemplate.of(tokenizer), tokenizer.eos_token_id
    prompts = [
        encode_prompt(list(prompt.messages), template, tokenizer)
        for prompt in read_prompts(["mixed"], limit=PROMPTS)
    ]
    with serve(target=str(target)) as server:
        answers = [server.complete(ids, LIMIT + DEPTHS + 1).token_ids for ids in prompts]
    torch_target = HFEagle3TargetModel.from_pretrained(TARGET, num_aux_layers=3, device="cpu")
    texts = [
        Text(ids, continued(torch_target.model, ids, answer))
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    return Place(root, target, texts, end)


def continued(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The answer with what the target would say after an end token: a round may reach there."""
    missing = LIMIT + DEPTHS + 1 - len(answer)
    if not missing:
        return answer
    ids = torch.tensor([prompt + answer])
    more = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=min(missing, DEPTHS + 1),
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in more[0, len(prompt) :]]


@dataclass(frozen=True)
class Case:
    draft: Path
    file: Path  # of the export
    replays: list[Replay]


@pytest.fixture(scope="module")
def case(place: Place) -> Callable[[str], Case]:
    @cache
    def make(kind: str) -> Case:
        directory = place.root / kind
        draft, target = trained(kind, place.texts[:TRAINED], directory)
        without = (
            kind == "eagle3"
        )  # the others' reduced vocabularies take rows of the target's head
        out = export_draft(
            directory, place.root / f"{kind}-served", engine="llama.cpp", target=TARGET,
            without_target=without, num_draft_tokens=DEPTHS,
            check=CheckOptions(limit=1, max_new_tokens=4),
        )  # fmt: skip
        return Case(directory, out / "draft.gguf", replayed(draft, target, place.texts))

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_rounds_are_those_of_replay(kind: str, place: Place, case: Any) -> None:
    served = place.serve(kind, case(kind).file)
    assert [a.token_ids for a in served.answers] == [place.expected(t) for t in place.texts]
    expected = [counted(result, LIMIT, place.end) for result in case(kind).replays]
    assert [(a.drafted, a.accepted) for a in served.answers] == [e[1:] for e in expected]
    assert served.rounds == sum(rounds for rounds, _, _ in expected)
    drafted, accepted = (sum(e[i] for e in expected) for i in (1, 2))
    assert PROMPTS < accepted < 0.9 * drafted
