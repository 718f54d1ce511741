"""Native multi-token heads in a real vLLM: every token that it proposes is the one that we propose.

The head is in a directory of its own, in MiMo's layout, beside an untouched Llama.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.cases import engine_target, greedy_texts, make_draft, train
from engines.vllm.test_vllm_export import (
    ANSWER,
    DEPTHS,
    PROMPT,
    Trained,
    assert_parity,
    compare,
    with_config,
)
from fledge.methods.mtp.draft import MtpDraftModel
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = pytest.mark.engine
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # as wide together as the model
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "fresh": (8, {}),
    "with biases": (8, {"attention_bias": True}),
    "of the state before the norm": (7, {}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any, engines: Any) -> Callable[[str], Trained]:
    """Heads by kind, each trained once; engines left open by other tests are closed."""
    engines.close()
    place = tmp_path_factory.mktemp("mtp")
    model = engine_target("llama", **HEADS)
    model.save_pretrained(place / "target")

    @cache
    def make(kind: str) -> Trained:
        layer, options = KINDS[kind]
        target = HFEagle3TargetModel(model, [layer], supervision="hidden", num_aux_layers=1)
        draft = make_draft(model, [layer], mtp_family="mimo", **HEADS, **options)
        rows = greedy_texts(model, count=10, prompt=PROMPT, answer=ANSWER + DEPTHS + 1)
        seen = rows[:8]
        train(draft, target, [(seen, torch.ones_like(seen), torch.ones_like(seen))] * 80)
        draft.eval().save_pretrained(place / kind)
        return Trained(draft, target, place / kind, place / "target", rows[6:].tolist())

    return make


@pytest.mark.parametrize("kind", ["fresh", "with biases"])
def test_vllm_proposes_what_we_propose(kind: str, trained: Any) -> None:
    assert_parity(trained(kind), "vllm")


def swapped(directory: Path) -> None:
    """The halves of the projection in the other order."""
    path, name = directory / "model.safetensors", "model.mtp_layers.0.input_proj.weight"
    tensors = load_file(path)
    halves = tensors[name].chunk(2, dim=1)
    save_file(tensors | {name: torch.cat(halves[::-1], dim=1).contiguous()}, path)


def test_another_order_is_noticed(trained: Any, tmp_path: Path) -> None:
    draft: Trained = trained("fresh")
    broken = with_config(draft.export("vllm"), lambda config: None, tmp_path / "broken")
    swapped(broken)
    assert_noticed(draft, broken, depth=0)


def test_no_zeros_at_position_0_are_noticed(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft: Trained = trained("fresh")
    export = draft.export("vllm")
    monkeypatch.setattr(
        MtpDraftModel, "embed_at", lambda self, token, position, dtype: self.embed(token, dtype)
    )
    assert_noticed(draft, export, depth=DEPTHS - 1)


def test_the_state_before_the_norm_is_noticed(trained: Any) -> None:
    """Served in the directory of the right one, which such a draft is refused."""
    draft: Trained = trained("of the state before the norm")
    with pytest.raises(ValueError, match="hands a head the state after the final norm"):
        draft.export("vllm")
    other = trained("fresh").export("vllm")
    mistaken = Trained(
        trained("fresh").draft, draft.target, other, draft.target_directory, draft.texts
    )
    assert_noticed(mistaken, other, depth=0)


def assert_noticed(draft: Trained, export: Path, *, depth: int) -> None:
    served = draft.serve(export)
    total, equal = compare(draft, served)
    assert equal[depth] < 0.95 * total[depth], (equal, total)
    assert served.answers == draft.answers  # whatever is drafted, the text is the target's
