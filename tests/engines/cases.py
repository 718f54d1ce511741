"""Tiny targets as directories that an engine loads, and short training runs of drafts for them.

Engines need head sizes that their kernels support (32 and up), so these are a little wider than the
tiny models of tests/target; depth 8 and the vocabulary are the same, and the contract suite runs
over them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from fledge.methods.base import TrainerInputs
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
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
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 13.0}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 16}),
    "phi3": ("Phi3Config", {"hidden_size": 128}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
}


def engine_target(name: str = "llama", *, seed: int = 0, **options: Any) -> Any:
    """A random fp32 model in eval mode whose weights are spread so that every part matters."""
    kind, special = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**_SMALL | special | options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
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


def make_draft(
    model: Any,
    aux_layer_ids: list[int],
    *,
    width: int | None = None,
    ids: torch.Tensor | None = None,
    seed: int = 1,
    **options: Any,
) -> DraftModel:
    """A random draft for a target, limited to `width` tokens of its vocabulary: the first of `ids`,
    or random ones."""
    torch.manual_seed(seed)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    plain = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "draft_vocab_size": width or vocabulary,
        "aux_layer_ids": aux_layer_ids,
        "num_aux_hidden_states": len(aux_layer_ids),
        "parallel_drafting": False,
    }
    config = transformers.LlamaConfig(**plain | options)
    draft = method_of(config).draft_type()(config)
    with torch.no_grad():  # distinct norms: a mix-up must show
        for weight in draft.parameters():
            if weight.ndim == 1:
                weight.add_(0.5 * torch.randn_like(weight))
    if width is not None:
        ids = (torch.randperm(vocabulary) if ids is None else ids)[:width].sort().values
        draft.set_vocab_mapping(ids, _marked(ids, vocabulary))
    if config.hidden_size == hidden:
        draft.copy_embeddings_from_target(model.get_input_embeddings())
    if not draft.lm_head.weight.requires_grad:
        draft.copy_head_from_target(model.lm_head)
    return draft


def _marked(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[ids] = True
    return mask


def train(
    draft: DraftModel,
    target: Eagle3TargetBackend,
    batches: Iterable[tuple[torch.Tensor, ...]],
    *,
    lr: float = 3e-3,
    **options: Any,
) -> list[float]:
    """Train the draft on the target's answers to the batches; returns the loss of every step.
    `options` are the objective's."""
    ids = draft.selected_token_ids
    assert ids is not None
    inputs = TrainerInputs(ids, _marked(ids, draft.config.vocab_size), target.info().head, None)
    method = method_of(draft.config)
    module: Any = method.objective(draft, inputs, **method.bench_options(depths=4) | options)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**target.generate_batch(*batch).to_trainer_inputs()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_answers(through: Any, local: Any, *rows: Any, tolerance: float = 1e-4) -> None:
    """Compare aux states, last hidden states and logits wherever there is a token."""
    close = {"rtol": tolerance, "atol": tolerance}
    for batch in rows:
        actual, expected = through.generate_batch(*batch), local.generate_batch(*batch)
        real, supervised = batch[1].bool(), actual.loss_mask.bool()
        aux = actual.aux_hidden_states[real], expected.aux_hidden_states[real]
        torch.testing.assert_close(*aux, **close)
        last = (answer.last_hidden_states[supervised] for answer in (actual, expected))
        torch.testing.assert_close(*last, **close)
        logits = [
            answer.with_logits(target.info().head).logits[supervised]
            for answer, target in ((actual, through), (expected, local))
        ]
        torch.testing.assert_close(*logits, **close)


def greedy_texts(model: Any, *, count: int, prompt: int, answer: int, seed: int = 0) -> Any:
    """[count, prompt + answer] random prompts and the model's own greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY, (count, prompt), generator=generator)
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=answer, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
