"""Every form of draft that the format holds, in a real llama.cpp beside a tiny target in float32:
texts and rounds are ours. The controls change one thing each in a file, as our self-check would not
let pass; then the rounds are not ours any more.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.llamacpp.drafts import counted
from engines.llamacpp.serving import ENVIRONMENT, serve
from engines.llamacpp.tiny import DEPTHS, END, KINDS, LIMIT, Tiny, Trained
from fledge.methods.registry import METHODS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="make test-llamacpp installs llama.cpp"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Callable[[str], Trained]:
    tiny = Tiny(tmp_path_factory.mktemp("tiny"))
    return cache(tiny.trained)


def accepted(draft: Trained, file: Path) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each text; whatever is drafted, the text is the target's."""
    algorithm, found = METHODS[draft.method].algorithms["llama.cpp"], []
    target, options = str(draft.tiny.gguf), {"draft_tokens": DEPTHS, "algorithm": algorithm}
    with serve(target=target, draft=str(file), **options) as server:
        for text in draft.tiny.texts:
            answer = server.complete(text.prompt_ids, LIMIT)
            expected = list(text.answer_ids[:LIMIT])
            if END in expected:
                expected = expected[: expected.index(END) + 1]
            assert answer.token_ids == expected
            found.append((answer.drafted, answer.accepted))
    return found


def ours(draft: Trained) -> list[tuple[int, int]]:
    return [counted(result, LIMIT, END, DEPTHS)[1:] for result in draft.replays]


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_ours(kind: str, trained: Any, tmp_path: Path) -> None:
    draft = trained(kind)
    assert accepted(draft, draft.write(tmp_path / "draft.gguf")) == ours(draft)
    assert sum(right for _, right in ours(draft)) > 2 * len(draft.replays)


def _offsets(draft: Trained) -> dict[str, Any]:
    d2t = load_file(draft.directory / "model.safetensors")["d2t"]
    return {"tensors": {"d2t": d2t - torch.arange(len(d2t))}}  # the writer adds it again


def _layout(**changed: Any) -> Callable[[Trained], dict[str, Any]]:
    return lambda draft: changed


CONTROLS: dict[str, tuple[str, Callable[[Trained], dict[str, Any]]]] = {
    "target layers": ("eagle3", _layout(aux_id_offset=0)),
    "target layers of a block": ("dflash", _layout(aux_id_offset=0)),
    "d2t as offsets": ("eagle3", _offsets),
    "order of q and k": ("eagle3", _layout(pairs_channels=False)),
    "order of q and k of a block": ("dflash", _layout(pairs_channels=True)),
    "mask token": ("dflash", _layout(keys={"tokenizer.ggml.mask_token_id": 40})),
    "llama3 rotary": ("eagle3, llama3 rotary", _layout(keys={"rope.freq_base": 50.0})),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_file_is_noticed(control: str, trained: Any, tmp_path: Path) -> None:
    kind, change = CONTROLS[control]
    draft = trained(kind)
    found = accepted(draft, draft.write(tmp_path / "wrong.gguf", **change(draft)))
    pairs = list(zip(found, ours(draft), strict=True))
    assert sum(their == our for their, our in pairs) <= len(pairs) // 2, pairs
