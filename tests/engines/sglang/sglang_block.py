"""A block draft as SGLang's own classes load and compute it, without its worker, which needs a GPU.

The class that the config names, its `load_weights`, and the calls that the worker makes: project
the target's states, write keys and values of the context layer by layer, run the block, and read
it through the target's head. Only the paged attention kernel is replaced, by one that keeps keys
and values as they come.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


class PlainAttention(nn.Module):
    """Queries of a block see the context and the block; in causal layers, only its past."""

    def __init__(self, layer: Any) -> None:
        from sglang.srt.layers.radix_attention import AttentionType

        super().__init__()
        self._shape = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self._causal = layer.attn_type == AttentionType.DECODER
        self.context: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any) -> Tensor:
        heads, kv_heads, size = self._shape
        assert self.context is not None
        keys, values = (
            torch.cat([kept, new]).view(-1, kv_heads, size).repeat_interleave(heads // kv_heads, 1)
            for kept, new in zip(self.context, (k, v), strict=True)
        )
        parts = (x.transpose(0, 1)[None] for x in (q.view(-1, heads, size), keys, values))
        mask = torch.ones(len(q), len(keys), dtype=torch.bool)
        if self._causal:
            mask = mask.tril(len(keys) - len(q))
        return F.scaled_dot_product_attention(*parts, attn_mask=mask)[0].transpose(0, 1).flatten(1)


class SGLangBlock:
    """Needs an open engine in the same process: SGLang's layers use its process groups."""

    def __init__(self, directory: Path, target: Any) -> None:
        from sglang.srt.models.registry import ModelRegistry
        from sglang.srt.utils.hf_transformers_utils import get_config

        self.config = get_config(str(directory), trust_remote_code=False)
        model_class, _ = ModelRegistry.resolve_model_cls(self.config.architectures)
        self.model: Any = model_class(self.config)
        self.model.load_weights(load_file(directory / "model.safetensors").items())
        self.target = target
        if hasattr(self.model, "attach_shared_modules"):
            self.model.attach_shared_modules(
                embed_tokens=target.model.embed_tokens, lm_head=target.lm_head
            )
        for layer in self.model.layers:
            layer.self_attn.attn = PlainAttention(layer.self_attn)

    def listened(self, depth: int) -> list[int]:
        """The target's layers whose states the worker requests."""
        ids: list[int] = self.model.draft_config.resolve_target_layer_ids(target_num_layers=depth)
        return ids

    @torch.inference_mode()
    def states(self, aux_TD: Tensor, newest: int, slots: int) -> Tensor:
        """[slots, E] after T verified tokens: the newest token, then masks, as in the worker."""
        pos_T = torch.arange(len(aux_TD))
        context_TE = self.model.project_target_hidden(aux_TD)
        for layer in self.model.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(context_TE)
            attention.attn.context = (
                attention.apply_k_rope(pos_T, attention.apply_k_norm(k)),
                v,
            )
        masks = [self.model.draft_config.mask_token_id] * (slots - 1)
        ids_J = torch.tensor([newest, *masks])
        embeds_JE = self.target.model.embed_tokens(ids_J)
        pos_J = len(aux_TD) + torch.arange(slots)
        states_JE: Tensor = self.model(ids_J, pos_J, None, input_embeds=embeds_JE).hidden_states
        return states_JE
