"""Block drafts as vLLM loads and computes them, without its second runner, which needs a GPU.

Everything else is vLLM's own: config, loader, classes, and the target whose embedding and head the
draft shares. Only the paged attention kernel is replaced, by one that keeps keys and values as
they come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainAttention(nn.Module):
    """Queries of a block see the context and all of the block."""

    kv_cache = None

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self._shape = heads, kv_heads, size
        self.impl = SimpleNamespace(do_kv_cache_update=self._keep)
        self._context: tuple[Tensor, Tensor] | None = None

    def _keep(self, layer: Any, keys: Tensor, values: Tensor, *_: Any) -> None:
        self._context = keys, values

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, kv_heads, size = self._shape
        assert self._context is not None
        keys, values = (
            torch.cat([kept, new.view(-1, kv_heads, size)]).repeat_interleave(heads // kv_heads, 1)
            for kept, new in zip(self._context, (k, v), strict=True)
        )
        parts = (x.transpose(0, 1)[None] for x in (q.view(-1, heads, size), keys, values))
        return F.scaled_dot_product_attention(*parts)[0].transpose(0, 1).flatten(1)


@contextmanager
def loaded_block(
    target: Path, speculative: dict[str, Any] | None, place: Path, *, kind: str = "dspark"
) -> Iterator[Any]:
    """vLLM's model of a draft of this kind ("dspark", "dflash"); `speculative` is the serve
    command's config, None where `target` is a draft that names its own target."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 1, "enforce_eager": True}
    with (
        patch.object(VllmConfig, "_validate_v1_model_runner", lambda self: None),
        patch.object(torch.accelerator, "empty_cache", lambda: None),  # as vLLM's CPU worker does
    ):
        args = EngineArgs(
            model=str(target), skip_tokenizer_init=True, speculative_config=speculative, **options
        )
        config = args.create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
            initialize_model_parallel(1, 1)
            try:
                load = load_dspark_model if kind == "dspark" else load_dflash_model
                model = load(get_model(vllm_config=config), config)
                _replace_attention(model)
                yield model
            finally:
                cleanup_dist_env_and_memory()


def _replace_attention(model: Any) -> None:
    for number, layer in enumerate(model.model.layers):
        outer = layer.self_attn
        outer.attn = PlainAttention(outer.num_heads, outer.num_kv_heads, outer.head_dim)
        model.model._attn_layers[number] = outer.attn


@torch.inference_mode()
def draft_block(model: Any, aux_TD: Tensor, newest: int, slots: int) -> dict[str, Tensor]:
    """What the classes compute after T verified tokens, called as the runner does: from left to
    right, always taking the most likely token."""
    pos_T = torch.arange(len(aux_TD))
    mask = model.config.mask_token_id
    model.precompute_and_store_context_kv(model.combine_hidden_states(aux_TD), pos_T, pos_T)
    tokens_J = torch.tensor([newest] + [mask] * (slots - 1))
    states_JE = model(tokens_J, len(aux_TD) + torch.arange(slots))
    logits_JW = model.compute_draft_logits(states_JE)
    before, rows = torch.tensor([newest]), []
    for state_E, base_W in zip(states_JE, logits_JW, strict=True):
        features = model.markov_embed(before)
        bias_W = model.markov_bias(features)[0]
        confidence = model.compute_confidence(state_E[None], features)[0]
        before = model.map_draft_to_target((base_W + bias_W).argmax()[None])
        rows.append((base_W, bias_W, confidence, before[0]))
    names = ("logits", "biases", "confidence", "tokens")
    by_name = zip(names, zip(*rows, strict=True), strict=True)
    return {name: torch.stack(values) for name, values in by_name}


@torch.inference_mode()
def walk_block(model: Any, aux_TD: Tensor, newest: int, slots: int) -> dict[str, Tensor]:
    """The same for the drafts that walk through candidates: ids, scores, and the greedy walk."""
    pos_T = torch.arange(len(aux_TD))
    context_TE = model.combine_hidden_states(aux_TD)
    model.precompute_and_store_context_kv(context_TE, pos_T, pos_T)
    mask = model.model.config.dflash_config["mask_token_id"]
    tokens_J = torch.tensor([newest] + [mask] * (slots - 1))
    states_KE = model(tokens_J, len(aux_TD) + torch.arange(slots))[1:]
    ids_KC, values_KC = model.compute_candidates(states_KE)
    if hasattr(model.model, "lilicorr"):
        scores = model.model.lilicorr(
            model.model.embed_input_ids(ids_KC)[None], values_KC[None], states_KE[None],
            model.model.hidden_norm(context_TE[-1:]), torch.ones(1, dtype=torch.bool),
        )  # fmt: skip
    else:
        newest_1 = torch.tensor([newest])
        scores = model.model.candidate_selector(
            ids_KC[None], values_KC[None], states_KE[None], newest_1
        )
    index, tokens = 0, []
    for ids_C, score_CC in zip(ids_KC, scores[0], strict=True):
        index = int(score_CC[index].argmax())
        tokens.append(ids_C[index])
    return {"tokens": torch.stack(tokens), "ids": ids_KC, "scores": scores[0]}
