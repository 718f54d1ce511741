"""`LlamaEagle3DraftModel`: the draft network and its training-time rollout.

`unroll` is the whole EAGLE-3 forward: features of the target in, one state per (anchor, depth)
element out. `objective` scores the states.

Shapes: N rows of a depth (see `rollout.plan`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from fledge.compat.flex_peagle import peagle_block_mask
from fledge.draft.base import DraftModel
from fledge.draft.config import check_draft_config
from fledge.draft.layer import (
    DeepDraftLayer,
    DraftLayer,
    FusedDraftLayer,
    LayerWeights,
    forget_mlp,
    linear,
    rms_norm,
)
from fledge.draft.rotary import Rotary, rotate
from fledge.kernels.attention.blocked import KeysValues
from fledge.kernels.attention.reference import AttentionKind, rollout_attention
from fledge.rollout.plan import QueryRows, RolloutPlan


class LlamaEagle3DraftModel(DraftModel):
    """fc over the target's aux states, a fused first layer, deeper Llama layers, norm, head.

    `config` is a Llama-style transformers config plus `draft_vocab_size`, `target_hidden_size`,
    `num_aux_hidden_states`, `fc_norm`, `norm_output`, and for P-EAGLE `parallel_drafting` and
    `mask_token_id` (all optional, see `check_draft_config`; P-EAGLE's rollout is in `parallel.py`).
    """

    architecture = "LlamaForCausalLMEagle3"

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_draft_config(config)
        self.config = config
        aux, size, eps = config.num_aux_hidden_states, config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = linear(aux * config.target_hidden_size, size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(aux)
            )
        deeper = [DeepDraftLayer(config) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([FusedDraftLayer(config), *deeper])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = linear(size, config.draft_vocab_size)
        self._register_vocabulary(config)
        if config.parallel_drafting:  # stands in for the aux states at depths >= 1, before fc
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))
        self.rotary = Rotary(config)
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)

    # --- the pieces ----------------------------------------------------------------------------

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., 3 * D] aux states of the target -> [..., E], normed chunk by chunk if `fc_norm`."""
        dtype = dtype or self.fc.weight.dtype
        aux = aux.to(dtype)
        if self.config.fc_norm:
            chunks = aux.chunk(self.config.num_aux_hidden_states, dim=-1)
            aux = torch.cat(
                [
                    rms_norm(chunk, weight.to(dtype), self.config.rms_norm_eps)
                    for chunk, weight in zip(chunks, self.fc_norm.parameters(), strict=True)
                ],
                dim=-1,
            )
        return F.linear(aux, self.fc.weight.to(dtype))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., E] as carried from depth to depth -> [..., W]; normed here unless carried so."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        return F.linear(hidden, self.lm_head.weight)

    def layer_weights(
        self, dtype: torch.dtype, *, recompute_mlp: bool = False
    ) -> list[LayerWeights]:
        """What a step computes with, layer by layer."""
        layers = cast(Iterable[DraftLayer], self.layers)
        return [layer.weights(dtype, recompute_mlp=recompute_mlp) for layer in layers]

    # --- P-EAGLE by hand: training goes through `parallel.py` --------------------------------

    def masked_projected_hidden(self) -> Tensor:
        """[1, E]: the placeholder through fc_norm and fc, as real aux states go."""
        self.check_parallel()
        return self.project_hidden_states(self.mask_hidden).reshape(1, -1)

    def build_peagle_block_mask(
        self, anchor_pos: Tensor, depth: Tensor, lengths: Tensor | Sequence[int], total_seq_len: int
    ) -> BlockMask:
        """The mask of one row's elements, in the order in which they are given."""
        return peagle_block_mask(anchor_pos, depth, lengths, total_seq_len)

    def forward_peagle(
        self,
        sampled_input_ids: Tensor,  # [1, N]: the real token at depth 0, mask_token_id deeper
        sampled_projected_hidden: Tensor,  # [1, N, E]: fc(aux) at depth 0, the placeholder deeper
        position_ids: Tensor,  # [1, N]: anchor + depth
        block_mask: BlockMask,
    ) -> Tensor:
        """[1, N, E] what `compute_logits` takes (after the norm if `norm_output`)."""
        hidden = sampled_projected_hidden
        embeds = self.embed_tokens(sampled_input_ids).to(hidden.dtype)
        for index, layer in enumerate(self.layers):
            inputs = (embeds, hidden) if index == 0 else (hidden,)
            layer_fn: Any = layer.forward_peagle
            hidden = self._run_draft_layer(layer_fn, *inputs, position_ids, block_mask)
        if self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden

    def check_parallel(self) -> None:
        """Refuse parallel drafting where there is no placeholder for it."""
        if not self.config.parallel_drafting:
            raise ValueError("parallel_drafting: the draft was built without it")

    # --- the rollout ---------------------------------------------------------------------------

    def unroll(
        self,
        aux_TD: Tensor,  # [T, 3 * D] on the plan's key axis
        input_ids_T: Tensor,
        plan: RolloutPlan,
        *,
        compute_dtype: torch.dtype | None = None,
        attention: AttentionKind = "fast",
    ) -> list[Tensor]:
        """Head inputs [N, E] (after the final norm) of every depth, rows as the plan orders them.

        Depth 0 reads the target's features at every slot; depth k >= 1 reads the draft's own state
        of depth k - 1 and the token k places further on, which is an index offset on the key axis.
        """
        dtype = compute_dtype or self.fc.weight.dtype
        step = _Step(self, plan, dtype, attention)
        embedding_TE = F.embedding(input_ids_T, self.embed_tokens.weight).to(dtype)
        token_T = step.layers[0].token_part(embedding_TE)
        assert token_T is not None
        state_NE = step.depth_zero(self.project_hidden_states(aux_TD, dtype), token_T)
        norm = self.norm.weight.to(dtype)
        outputs = []
        for depth, rows in enumerate(plan.depths):
            if depth > 0:
                state_NE = step.deeper(state_NE[: len(rows)], token_T, depth, rows)
            outputs.append(rms_norm(state_NE, norm, self.config.rms_norm_eps))
            if self.config.norm_output:
                state_NE = outputs[-1]
        return outputs

    forward = unroll


class _Step:
    """What one rollout carries from depth to depth: depth-0 keys, and the chains, per layer."""

    def __init__(
        self,
        model: LlamaEagle3DraftModel,
        plan: RolloutPlan,
        dtype: torch.dtype,
        attention: AttentionKind,
    ) -> None:
        self.model, self.plan, self.kind = model, plan, attention
        self.channels = model.config.head_dim
        rows = len(model.layers) * sum(plan.counts)
        forget = not model.checkpoints_layers and forget_mlp(
            model.config, rows, dtype, kept_gib=2.5
        )
        self.layers = model.layer_weights(dtype, recompute_mlp=forget)
        self.cos_TC, self.sin_TC = model.rotary(plan.position_T, dtype)
        self.prefix: list[KeysValues] = []
        self.chains: list[list[KeysValues]] = [[] for _ in self.layers]

    def depth_zero(self, state_TE: Tensor, token_T: Tensor) -> Tensor:
        """Every slot leaves keys and values; only the last layer's queries are the anchors' own."""
        token: Tensor | None = token_T
        for index, layer in enumerate(self.layers):
            rows = self.plan.depths[0] if index == len(self.layers) - 1 else self.plan.every
            state_TE, keys, values = self.model._run_draft_layer(
                self._layer_zero, layer, state_TE, token, rows
            )
            self.prefix.append((keys, values))
            token = None
        return state_TE

    def deeper(self, state_NE: Tensor, token_T: Tensor, depth: int, rows: QueryRows) -> Tensor:
        slot_N = rows.slot_N + depth  # documents are contiguous: k tokens on is k places on
        token: Tensor | None = token_T.index_select(0, slot_N)
        for index, layer in enumerate(self.layers):
            # the chain as it is now: a checkpointed layer runs again after it has grown
            before = tuple(self.chains[index])
            state_NE, keys, values = self.model._run_draft_layer(
                self._layer_deeper, layer, state_NE, token, rows, slot_N, self.prefix[index], before
            )
            self.chains[index].append((keys, values))
            token = None
        return state_NE

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), x.shape[1] // self.channels, self.channels)

    def _layer_zero(
        self, layer: LayerWeights, state_TE: Tensor, token_T: Tensor | None, rows: QueryRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed_TE = layer.normed(state_TE)
        kv = layer.project(normed_TE, token_T, slice(layer.q_size, None))
        keys, values = self._heads(kv).chunk(2, dim=1)
        keys = rotate(keys, self.cos_TC, self.sin_TC)
        cos, sin = self.cos_TC, self.sin_TC
        if rows is not self.plan.every:
            state_TE, normed_TE = (x.index_select(0, rows.slot_N) for x in (state_TE, normed_TE))
            cos, sin = (x.index_select(0, rows.slot_N) for x in (cos, sin))
            if token_T is not None:
                token_T = token_T[:, : layer.q_size].index_select(0, rows.slot_N)
        q = layer.project(normed_TE, token_T, slice(0, layer.q_size))
        q = rotate(self._heads(q), cos, sin)
        out = rollout_attention(q, keys, values, rows, kind=self.kind)
        return layer.finish(state_TE, out), keys, values

    def _layer_deeper(
        self,
        layer: LayerWeights,
        state_NE: Tensor,
        token_N: Tensor | None,
        rows: QueryRows,
        slot_N: Tensor,
        prefix: KeysValues,
        before: Sequence[KeysValues],
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = layer.project(layer.normed(state_NE), token_N, slice(None))
        kv_size = (qkv.shape[1] - layer.q_size) // 2
        parts = torch.split(qkv, [layer.q_size, kv_size, kv_size], dim=1)  # gradient: one cat
        q, keys, values = map(self._heads, parts)
        cos, sin = (x.index_select(0, slot_N) for x in (self.cos_TC, self.sin_TC))
        q, keys = rotate(q, cos, sin), rotate(keys, cos, sin)
        chain = (*before, (keys, values))
        out = rollout_attention(q, *prefix, rows, chain=chain, kind=self.kind)
        return layer.finish(state_NE, out), keys, values
