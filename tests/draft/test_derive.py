"""Deriving a draft's config from the target's, verified with transformers' rotary modules."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from fledge import BadInput, LlamaEagle3DraftModel
from fledge.methods.shared.config import derive_draft_config
from fledge.methods.shared.rotary import ROPE_LAYERS, verify_rotary

TINY = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 131072,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_KNOBS = {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.8}
YARN_KNOBS["truncate"] = False
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def text(config_class, **changes):
    return config_class(**copy.deepcopy(TINY | changes))  # transformers writes into rope dicts


def gemma3():
    return hf.Gemma3Config(
        text_config=TINY | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )  # fmt: skip


GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 4,
}  # fmt: skip


def gemma4():
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16,
    }  # fmt: skip
    return hf.Gemma4Config(text_config=TINY | GEMMA4, vision_config=vision, audio_config=None)


TARGETS = {
    "LlamaForCausalLM": lambda: text(hf.LlamaConfig),
    "MistralForCausalLM": lambda: text(hf.MistralConfig, head_dim=16, rope_theta=1e6),
    "Qwen2ForCausalLM": lambda: text(hf.Qwen2Config, rope_theta=1e6),
    "Qwen3ForCausalLM": lambda: text(hf.Qwen3Config, head_dim=16, rope_theta=1e6),
    "Qwen3MoeForCausalLM": lambda: text(hf.Qwen3MoeConfig, head_dim=16, **MOE),
    "Phi3ForCausalLM": lambda: text(hf.Phi3Config),
    "Gemma3ForCausalLM": lambda: text(
        hf.Gemma3TextConfig, head_dim=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForCausalLM": lambda: text(hf.Gemma4TextConfig, **GEMMA4),
    "Gemma4ForConditionalGeneration": gemma4,
    "GptOssForCausalLM": lambda: text(hf.GptOssConfig, head_dim=16, num_local_experts=2),
}
ROPES = {
    "default": {"rope_theta": 5e5},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
    "yarn, all knobs": {"rope_theta": 1e6, "rope_scaling": YARN | YARN_KNOBS},
}


def build(config, name):
    torch.manual_seed(0)
    return getattr(hf, name)(config)


def test_every_registered_architecture_is_tested():
    assert set(ROPE_LAYERS) <= set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_derived_from_every_architecture(name):
    target = build(TARGETS[name](), name)
    config = derive_draft_config(target.config, architecture=name, draft_vocab_size=20)
    verify_rotary(config, target)
    inner = getattr(target.config, "text_config", target.config)
    layer = inner.per_layer_config[0] if "Gemma4" in name else inner
    for field in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config, field) == getattr(layer, field)
    assert config.intermediate_size == 48
    assert config.rms_norm_eps == inner.rms_norm_eps
    assert config.head_dim == (getattr(layer, "head_dim", None) or 8)
    assert config.max_position_embeddings == 131072
    assert config.target_hidden_size == 32
    draft = LlamaEagle3DraftModel(config)
    draft.copy_embeddings_from_target(target.get_input_embeddings())
    assert draft.lm_head.weight.shape == (20, 32)


LAYOUTS = {
    **{name: (lambda rope=rope: text(hf.LlamaConfig, **rope), "Llama")
       for name, rope in ROPES.items()},
    "interleaved": (lambda: text(hf.CohereConfig), "Cohere"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_rope_type_is_carried_over(kind):
    make, family = LAYOUTS[kind]
    target = build(make(), f"{family}ForCausalLM")
    verify_rotary(derive_draft_config(target.config), target)


def test_partial_rotary_is_carried_over():
    target = build(text(hf.Phi3Config, partial_rotary_factor=0.5), "Phi3ForCausalLM")
    config = derive_draft_config(target.config)
    verify_rotary(config, target)
    assert len(LlamaEagle3DraftModel(config).rotary.inv_freq) == 2  # 8 channels, 4 of them rotated


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama3", {"rope_theta": 4.9e5}),
        ("llama3", {"rope_scaling": None}),
        ("llama3", {"head_dim": 4}),
        ("yarn", {"rope_scaling": YARN | {"attention_factor": 1.0}}),
    ],
)
def test_the_rotary_check_notices_what_was_dropped(kind, changes):
    target = build(text(hf.LlamaConfig, **ROPES[kind]), "LlamaForCausalLM")
    wrong = derive_draft_config(text(hf.LlamaConfig, **ROPES[kind] | changes))
    with pytest.raises(BadInput, match="rotary"):
        verify_rotary(wrong, target)


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
REFUSED = {
    "absolute positions": (lambda: hf.GPT2Config(), "no rotary positions"),
    "no positions config": (lambda: hf.BloomConfig(), "no rotary positions"),
    "ALiBi": (lambda: hf.FalconConfig(alibi=True), "no rotary positions"),
    "MRoPE": (
        lambda: text(
            hf.LlamaConfig, rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]}
        ),
        "MRoPE",
    ),
    "longrope": (lambda: text(hf.LlamaConfig, rope_scaling=LONGROPE), "longrope"),
    "dynamic": (
        lambda: text(hf.LlamaConfig, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "dynamic",
    ),
    "layers that differ": (
        lambda: text(hf.Gemma3TextConfig, layer_types=["sliding_attention", "full_attention"]),
        "rotate differently",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_positions_are_rejected_with_the_reason(case):
    make, reason = REFUSED[case]
    with pytest.raises(BadInput, match=reason) as caught:
        derive_draft_config(make())
    assert "\n" not in str(caught.value)


def test_a_target_without_a_rotary_module_is_rejected():
    with pytest.raises(BadInput, match="rotary_emb"):
        verify_rotary(derive_draft_config(text(hf.LlamaConfig)), nn.Linear(2, 2))
