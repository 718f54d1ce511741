"""What a target architecture needs said when a draft is derived from it: one line each.

Most need nothing: the config speaks for itself, and the rotary check of `derive.py` proves it. An
architecture that is not listed is taken at its word in the same way.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetFamily:
    """How to read a target's config."""

    rope_layers: str | None = None  # whose rotary the draft takes when layer types differ


PLAIN = TargetFamily()
GLOBAL_ROPE = TargetFamily(rope_layers="full_attention")  # the draft attends to everything too

FAMILIES = {
    "LlamaForCausalLM": PLAIN,  # SmolLM and SmolLM2 too
    "MistralForCausalLM": PLAIN,
    "Qwen2ForCausalLM": PLAIN,
    "Qwen3ForCausalLM": PLAIN,
    "Qwen3MoeForCausalLM": PLAIN,
    "Phi3ForCausalLM": PLAIN,
    "Gemma3ForCausalLM": GLOBAL_ROPE,
    "Gemma3ForConditionalGeneration": GLOBAL_ROPE,
    "GptOssForCausalLM": PLAIN,
}


def family_of(architecture: str | None) -> TargetFamily:
    return FAMILIES.get(architecture or "", PLAIN)
