"""Exported DFlash drafts in a real vLLM: it proposes our tokens at every slot, and its counters
equal our replay. Negative controls must fail. (DSpark: test_vllm_dspark.py.)"""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from engines.cases import VOCABULARY, engine_target, greedy_texts, make_draft, train
from engines.vllm.test_vllm_export import (
    ANSWER,
    DEPTHS,
    PROMPT,
    Trained,
    assert_parity,
    compare,
    with_config,
)
from fledge.formats.export import export_draft
from fledge.formats.self_check import CheckOptions
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = pytest.mark.engine
_BLOCK = {"block_size": DEPTHS + 1, "mask_token_id": 2, "num_hidden_layers": 2}
LAYERS = [1, 3, 5]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, causal": {"causal": True},
    "dflash, small vocabulary": {"width": 60},
    "dflash, sliding": {"sliding_layers": [0, 1], "sliding_window": 9},
    "dflash, five layers": {"num_hidden_layers": 5},
    "dflash, one layer": {"num_hidden_layers": 1},
}


class TrainedBlock(Trained):
    """Exporting a reduced vocabulary takes rows of the target's head, so it needs the target."""

    def export(self, engine: str) -> Path:
        if self.draft.config.draft_vocab_size == self.draft.config.vocab_size:
            return super().export(engine)
        out = self.directory.parent / f"{self.directory.name}-{engine}"
        if not out.exists():
            check = CheckOptions(limit=2, max_new_tokens=8)
            target = str(with_tokenizer(self.target_directory, out.with_name("target")))
            export_draft(self.directory, out, engine=engine, target=target, check=check)
        return out


def with_tokenizer(target: Path, out: Path) -> Path:
    """A copy of the target with a small tokenizer, for prompts."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w5"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w5", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(shutil.copytree(target, out))
    return out


def fitted(kind: str, directory: Path, target_directory: Path) -> Trained:
    model = engine_target("llama")
    target = HFEagle3TargetModel(model, LAYERS, supervision="hidden", num_aux_layers=len(LAYERS))
    draft = make_draft(model, LAYERS, **_BLOCK | KINDS[kind])
    draft.borrow_from(target)
    rows = greedy_texts(model, count=10, prompt=PROMPT, answer=ANSWER + DEPTHS + 1)
    seen = rows[:8]
    train(draft, target, [(seen, torch.ones_like(seen), torch.ones_like(seen))] * 60)
    draft.eval().save_pretrained(directory)
    return TrainedBlock(draft, target, directory, target_directory, rows[6:].tolist())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any, engines: Any) -> Callable[[str], Trained]:
    engines.close()

    @cache
    def make(kind: str) -> Trained:
        return fitted(kind, tmp_path_factory.mktemp("block") / kind, engines.saved("llama"))

    return make


CASES = [(kind, "vllm") for kind in KINDS if kind != "dflash, one layer"]


@pytest.mark.usefixtures("norms_by_layer")
@pytest.mark.parametrize(("kind", "engine"), [*CASES, ("dflash", "speculators")])
def test_vllm_proposes_the_blocks_that_we_propose(kind: str, engine: str, trained: Any) -> None:
    assert_parity(trained(kind), engine)


def test_one_layer_is_right_as_vllm_is(trained: Any) -> None:
    """Without `norms_by_layer`: nothing but the norms of further layers makes a difference."""
    assert_parity(trained("dflash, one layer"), "vllm")


@pytest.mark.parametrize("kind", ["dflash", "dflash, five layers"])
def test_a_norm_of_another_layer_is_noticed(kind: str, trained: Any) -> None:
    """Without `norms_by_layer`: once this fails, vLLM's kernel is right and the fixture can go, and
    so can the warning of `fledge serve`."""
    draft: Trained = trained(kind)
    total, equal = compare(draft, draft.serve(draft.export("vllm")))
    assert sum(equal) < 0.95 * sum(total)


def _nested(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        for name in outer:
            config = config[name]
        config[last] = value

    return change


CONTROLS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "layers": ("vllm", _nested("dflash_config.target_layer_ids", [2, 4, 6])),
    "mask token": ("vllm", _nested("dflash_config.mask_token_id", 7)),
    "rotary layout": ("vllm", _nested("is_neox_style", False)),
    "causal": ("vllm", _nested("is_causal", True)),
    "ids counted as ours": ("speculators", _nested("aux_hidden_state_layer_ids", LAYERS)),
    "window's direction": ("speculators", _nested("sliding_window_non_causal", False)),
}


@pytest.mark.usefixtures("norms_by_layer")
@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_block_is_noticed(control: str, trained: Any, tmp_path: Path) -> None:
    engine, change = CONTROLS[control]
    draft: Trained = trained("dflash")
    served = draft.serve(with_config(draft.export(engine), change, tmp_path / "broken"))
    total, equal = compare(draft, served)
    assert sum(equal) < 0.99 * sum(total)  # the window's direction matters least
    assert served.answers == draft.answers
