"""Drafts for targets of several families, derived, trained and exported: a real vLLM proposes
exactly what fledge proposes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.cases import engine_target, greedy_texts, saved, train
from engines.vllm.test_vllm_export import ANSWER, DEPTHS, PROMPT, Trained, assert_parity
from fledge.methods.registry import METHODS
from fledge.methods.shared.config import derive_draft_config
from fledge.methods.shared.rotary import verify_rotary
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = pytest.mark.engine


# vLLM does not pass inner states of Gemma 3 to drafts; EAGLE-1 needs none
FAMILIES = {"qwen3": "eagle3", "phi3": "eagle3", "gpt-oss": "eagle3", "gemma3": "eagle1"}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_proposes_what_each_family_proposes(family: str, engines: Any, tmp_path: Path) -> None:
    engines.close()
    model, method = engine_target(family), METHODS[FAMILIES[family]]
    target = HFEagle3TargetModel(model, supervision="hidden", num_aux_layers=method.aux_layers())
    settings = method.draft_settings(None, tokenizer=None, vocab_size=97)
    config = derive_draft_config(model.config, architecture=type(model).__name__, **settings)
    verify_rotary(config, model)
    torch.manual_seed(1)
    draft = method.draft_type()(config)
    draft.copy_embeddings_from_target(target.get_input_embeddings())
    draft.copy_head_from_target(model.lm_head)
    draft.embed_tokens.weight.requires_grad_(False)
    draft.config.aux_layer_ids = target.aux_layer_ids
    rows = greedy_texts(model, count=10, prompt=PROMPT, answer=ANSWER + DEPTHS + 1)
    seen = rows[:8]
    losses = train(draft, target, [(seen, torch.ones_like(seen), torch.ones_like(seen))] * 80)
    assert losses[-1] < losses[0]
    draft.eval().save_pretrained(tmp_path / "draft")
    directory = saved(model, tmp_path / "target")
    trained = Trained(draft, target, tmp_path / "draft", directory, rows[6:].tolist())
    assert_parity(trained, "vllm")
