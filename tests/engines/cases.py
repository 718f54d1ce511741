"""Tiny targets as directories that an engine loads, and the loss curve of a short training run.

Engines want head sizes that their kernels know (32 and more), so these are a little wider than the
tiny models of tests/target; depth 8 and the vocabulary are the same, and the contract suite runs
over them.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from fledge.draft.model import LlamaEagle3DraftModel
from fledge.objective.eagle3 import Eagle3TrainerModule
from fledge.target.base import Eagle3TargetBackend

VOCABULARY = 97
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_SMALL),
    "llama-tied": lambda: transformers.LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_SMALL),
    "granite": lambda: transformers.GraniteConfig(**_SMALL, logits_scaling=13.0),
}


def engine_target(name: str = "llama", *, seed: int = 0) -> Any:
    """A random fp32 model in eval mode whose weights are spread so that every part matters."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def saved(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory
