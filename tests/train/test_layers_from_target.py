"""A draft that is initialized from the last layers of its target."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.methods.shared.config import derive_draft_config
from fledge.rollout.slots import RowMasks
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import find_layers
from fledge.training.setup import set_up
from target.tiny_models import tiny_model
from train.tiny import make_chats, recipe_for


def draft_from_last_layers(model, layers):
    """A draft that reads the states before the last layers and is initialized from those layers."""
    depth = len(find_layers(model))
    read_layer = depth - 1 - layers
    ids = [*(i for i in range(depth) if i != read_layer), read_layer][-3:]
    target = HFEagle3TargetModel(model, ids, supervision="hidden")
    vocab = model.config.vocab_size
    has_qk_norm = hasattr(find_layers(model)[0].self_attn, "q_norm")
    config = derive_draft_config(
        model.config, draft_vocab_size=vocab, num_hidden_layers=layers, qk_norm=has_qk_norm
    )
    draft = LlamaEagle3DraftModel(config)
    draft.set_vocab_mapping(torch.arange(vocab), torch.ones(vocab, dtype=torch.bool))
    draft.copy_embeddings_from_target(target.get_input_embeddings())
    draft.copy_head_from_target(model.get_output_embeddings())
    draft.start_as_target(model)
    return draft, target


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_without_the_token_half_the_draft_predicts_what_the_target_does(architecture, layers):
    model = tiny_model(architecture)
    draft, target = draft_from_last_layers(model, layers)
    size = model.config.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(draft.layers[0].self_attn, name).weight[:, :size].zero_()
    ids = torch.randint(0, model.config.vocab_size, (1, 12))
    answer = target.answer(TokenBatch(ids, torch.ones_like(ids), torch.ones_like(ids)))
    objective = Eagle3TrainerModule(
        draft, selected_token_ids=torch.arange(model.config.vocab_size),
        selected_token_mask=torch.ones(model.config.vocab_size, dtype=torch.bool), ttt_steps=1,
        target_head=target.info().head,
    )  # fmt: skip
    plan = objective.plan(RowMasks(torch.ones(1, 12), torch.ones(1, 12)))
    with torch.no_grad():
        [states] = draft(answer.aux_hidden_states[0], answer.input_ids[0], plan)
        draft_logits = states @ draft.lm_head.weight.t()
        target_logits = model(ids).logits[0, plan.slot_T[plan.depths[0].slot_N]]
    torch.testing.assert_close(draft_logits, target_logits.float(), rtol=1e-4, atol=1e-4)


def test_a_norm_that_adds_one_is_copied_by_its_effective_weight():
    model = tiny_model("llama")
    layer = find_layers(model)[-1]

    class AddsOne(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight - 1)

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * (1 + self.weight)

    effective = torch.rand_like(layer.input_layernorm.weight) + 0.5
    layer.input_layernorm = AddsOne(effective)
    draft, _ = draft_from_last_layers(model, 1)
    torch.testing.assert_close(draft.layers[0].hidden_norm.weight, effective)


def test_a_layer_that_does_not_fit_is_reported_in_one_line():
    model, qwen3 = tiny_model("llama"), tiny_model("qwen3")
    draft, _ = draft_from_last_layers(model, 1)
    del find_layers(qwen3)[-1].mlp.up_proj
    with pytest.raises(BadInput, match=r"no plain weight mlp\.up_proj; .*from_target=false"):
        draft.start_as_target(qwen3)
    find_layers(model)[-1].mlp.up_proj = torch.nn.Linear(3, 5, bias=False)
    with pytest.raises(BadInput, match=r"the target's is \(5, 3\), the draft's"):
        draft.start_as_target(model)


def test_a_recipe_can_request_it(tiny_target, tmp_path):
    chats, run = make_chats(tmp_path / "chats.jsonl"), tmp_path / "run"
    training = set_up(recipe_for(tiny_target, chats, run, "draft.layers_from_target=true"))
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    last = find_layers(model)[-1]
    assert torch.equal(training.draft.layers[0].mlp.up_proj.weight, last.mlp.up_proj.weight)
    torch.testing.assert_close(training.draft.norm.weight, model.model.norm.weight)
