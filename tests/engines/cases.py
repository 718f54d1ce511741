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


def draft_for(target: Eagle3TargetBackend, *, seed: int = 1, **options: Any) -> Any:
    """A random draft of the target's width over its whole vocabulary."""
    info = target.info()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=info.vocab_size, hidden_size=info.hidden_size, intermediate_size=96,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=256, **options,
    )  # fmt: skip
    draft = LlamaEagle3DraftModel(config)
    draft.copy_embeddings_from_target(target.get_input_embeddings())
    return draft


def loss_curve(
    target: Eagle3TargetBackend, batches: list[tuple[torch.Tensor, ...]], *, lr: float = 3e-3
) -> list[float]:
    """Train a draft on what the target says about each batch; the loss of every step."""
    draft = draft_for(target)
    every = torch.arange(draft.config.vocab_size)
    module = Eagle3TrainerModule(
        draft,
        selected_token_ids=every,
        selected_token_mask=torch.ones(len(every), dtype=torch.bool),
        ttt_steps=3,
        target_head=target.info().head,
    )
    optimizer = torch.optim.Adam(draft.parameters(), lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**target.generate_batch(*batch).to_trainer_inputs()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
