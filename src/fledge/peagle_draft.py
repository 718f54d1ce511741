"""P-EAGLE's pass through flex attention, as mixins of the draft and its layers.

For callers who flatten their (anchor, depth) elements themselves, in any order, and give one mask.
Training does not use it: `methods.peagle.draft` computes the same on a plan, with the same weights.
The classes of `methods.eagle3.draft` inherit the mixins. Flex attention is compiled where Inductor
supports the tensors; elsewhere, and after a failed compilation, the scores are dense.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from fledge.methods.shared.config import DraftConfig
from fledge.methods.shared.layer import DeepDraftLayer, DraftAttention, DraftLayer, FusedDraftLayer
from fledge.methods.shared.rotary import Rotary, rotate
from fledge.methods.shared.unroll import UnrolledDraftModel

logger = logging.getLogger(__name__)

# --- mask ----------------------------------------------------------------------------------------

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def create_peagle_mask_mod(
    anchor_pos: Tensor,  # [N] or [1, N]: position of each element's anchor in the row
    depth: Tensor,  # [N] or [1, N]: depth of each element
    lengths: Tensor | Sequence[int],  # documents of the row, one after another
    total_seq_len: int,  # width of the row; padding follows the documents
) -> MaskMod:
    """Visible(q, kv) = same document, not padding, and (kv is a depth-0 element not after q's
    anchor, or an element of q's own rollout that is not deeper)."""
    anchor_N, depth_N = anchor_pos.reshape(-1).contiguous(), depth.reshape(-1)
    if anchor_N.shape != depth_N.shape:
        raise ValueError(f"depth: {len(depth_N)} elements for {len(anchor_N)} in anchor_pos")
    end_J = torch.cumsum(torch.as_tensor(lengths, device=anchor_N.device).reshape(-1), dim=0)
    if len(end_J) and int(end_J[-1]) > total_seq_len:
        raise ValueError(f"lengths: sum to {int(end_J[-1])}, more than {total_seq_len}")
    document_N = torch.searchsorted(end_J, anchor_N, right=True)
    inside_N = (anchor_N >= 0) & (document_N < len(end_J))  # neither padding nor outside the row

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = (document_N[q] == document_N[kv]) & inside_N[q] & inside_N[kv]
        prefix = (depth_N[kv] == 0) & (anchor_N[kv] <= anchor_N[q])
        rollout = (anchor_N[kv] == anchor_N[q]) & (depth_N[kv] <= depth_N[q])
        return same & (prefix | rollout)

    return mask_mod


# --- attention -----------------------------------------------------------------------------------

_MIN_CHANNELS = 16  # smallest head dimension that Inductor's kernels support
_COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_peagle_flex_attention_compile_failed = False  # then it is not tried again in this process


@cache
def _compiled() -> Callable[..., Any]:
    """Not at import: Inductor takes seconds to import, and most programs never attend here."""
    return torch.compile(flex_attention, mode="max-autotune-no-cudagraphs", dynamic=True)


def _peagle_flex_attention_compiled(*args: Any, **kwargs: Any) -> Any:
    return _compiled()(*args, **kwargs)


def _peagle_compile_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether Inductor's flex-attention lowering supports these tensors."""
    return (
        q.device.type == "cuda"
        and {k.device, v.device} == {q.device}
        and q.dtype in _COMPILED_DTYPES
        and {k.dtype, v.dtype} == {q.dtype}
        and min(q.shape[-1], v.shape[-1]) >= _MIN_CHANNELS
    )


def _peagle_flex_attention(
    q: Tensor,  # [B, H, N, C]
    k: Tensor,  # [B, G, N, C]
    v: Tensor,  # [B, G, N, C]
    block_mask: BlockMask,
    scale: float,
) -> Tensor:
    """Attention output [B, H, N, C]; elements that see nothing (padding) get zeros."""
    global _peagle_flex_attention_compile_failed
    if not _peagle_flex_attention_compile_failed and _peagle_compile_supported(q, k, v):
        try:
            out: Tensor = _peagle_flex_attention_compiled(
                q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True
            )
            return out
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what Dynamo, Inductor and Triton raise
            _peagle_flex_attention_compile_failed = True
            logger.warning("flex attention is not compiled, dense from now on: %s", error)
    return _dense_attention(q, k, v, block_mask, scale)


def _dense_attention(
    q_BHNC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, block_mask: BlockMask, scale: float
) -> Tensor:
    batch, heads, queries = q_BHNC.shape[:3]
    repeat, wide = heads // k_BGNC.shape[1], torch.promote_types(q_BHNC.dtype, torch.float32)
    k, v = (x.to(wide).repeat_interleave(repeat, dim=1) for x in (k_BGNC, v_BGNC))
    visible = create_mask(
        block_mask.mask_mod, batch, heads, queries, k.shape[2], device=str(q_BHNC.device)
    )
    scores = (q_BHNC.to(wide) * scale) @ k.transpose(-1, -2)
    seen = visible.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~visible & seen, float("-inf")).softmax(dim=-1)
    return ((weights @ v) * seen).to(q_BHNC.dtype)


# --- mixins --------------------------------------------------------------------------------------


class _PeagleAttentionMixin(DraftAttention):
    """P-EAGLE's attention: all elements in one pass."""

    rotary: Rotary  # the draft's

    def forward_peagle(
        self,
        combined_states: Tensor,  # [B, N, in_features]
        position_ids: Tensor,  # [B, N] or [1, N]: anchor + depth
        block_mask: BlockMask,
    ) -> Tensor:
        """Attend with all elements at once; the mask alone decides which keys each one sees."""
        batch, count, _ = combined_states.shape
        position_ids = position_ids.expand(batch, count).reshape(-1)
        cos, sin = self.rotary(position_ids, combined_states.dtype)
        q, k, v = (
            proj(combined_states).reshape(batch * count, -1, self.channels)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            x.view(batch, count, -1, self.channels).transpose(1, 2)
            for x in (rotate(q, cos, sin), rotate(k, cos, sin), v)
        )
        out = _peagle_flex_attention(q, k, v, block_mask, self.channels**-0.5)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


def _attend(
    layer: DraftLayer, inputs: Tensor, residual: Tensor, position_ids: Tensor, block_mask: BlockMask
) -> Tensor:
    """A layer's attention and MLP, with their residuals."""
    attention = cast(_PeagleAttentionMixin, layer.self_attn)
    state = residual + attention.forward_peagle(inputs, position_ids, block_mask)
    out: Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
    return out


class _PeagleDecoderLayerMixin(FusedDraftLayer):
    """P-EAGLE's pass through the fused first layer."""

    def forward_peagle(
        self,
        input_embeds: Tensor,  # [B, N, E]
        hidden_states: Tensor,  # [B, N, E]
        position_ids: Tensor,
        block_mask: BlockMask,
    ) -> Tensor:
        normed = [self.input_layernorm(input_embeds), self.hidden_norm(hidden_states)]
        residual = normed[1] if self.norm_residual else hidden_states
        return _attend(self, torch.cat(normed, dim=-1), residual, position_ids, block_mask)


class _PeagleVanillaLayerMixin(DeepDraftLayer):
    """P-EAGLE's pass through a deeper layer, an ordinary pre-norm Llama layer."""

    def forward_peagle(
        self, hidden_states: Tensor, position_ids: Tensor, block_mask: BlockMask
    ) -> Tensor:
        inputs = self.input_layernorm(hidden_states)
        return _attend(self, inputs, hidden_states, position_ids, block_mask)


class _PeagleDraftMixin(UnrolledDraftModel):
    """P-EAGLE's placeholder, and its pass through the whole draft."""

    norm: nn.RMSNorm
    mask_hidden: nn.Parameter  # [1, 1, A * D]

    def _init_peagle_parameters(self, config: DraftConfig) -> None:
        """Register the placeholder: it replaces the aux states at depths >= 1, before fc."""
        width = config.num_aux_hidden_states * config.target_hidden_size  # fc's inputs
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width))

    def check_parallel(self) -> None:
        """Raise ValueError if the draft was built without parallel drafting."""
        if not self.spec.parallel_drafting:
            raise ValueError("parallel_drafting: the draft was built without it")

    def masked_projected_hidden(self) -> Tensor:
        """[1, E]: the placeholder, normed and projected as real aux states are."""
        self.check_parallel()
        return self.project_hidden_states(self.mask_hidden).reshape(1, -1)

    @staticmethod
    def build_peagle_block_mask(
        anchor_pos: Tensor, depth: Tensor, lengths: Tensor | Sequence[int], total_seq_len: int
    ) -> BlockMask:
        """`create_peagle_mask_mod` as a block mask over all elements of a row."""
        mask_mod = create_peagle_mask_mod(anchor_pos, depth, lengths, total_seq_len)
        count, device = anchor_pos.numel(), str(anchor_pos.device)
        return create_block_mask(mask_mod, None, None, count, count, device=device)

    def forward_peagle(
        self,
        sampled_input_ids: Tensor,  # [1, N]: the real token at depth 0, the placeholder's deeper
        sampled_projected_hidden: Tensor,  # [1, N, E]: fc(aux) at depth 0, the placeholder deeper
        position_ids: Tensor,  # [1, N]: anchor + depth
        block_mask: BlockMask,
    ) -> Tensor:
        """[1, N, E] states for `compute_logits` (after the norm if `norm_output`)."""
        hidden = sampled_projected_hidden
        embeds = self.embed_tokens(sampled_input_ids).to(hidden.dtype)
        for index, layer in enumerate(self.layers):
            inputs = (embeds, hidden) if index == 0 else (hidden,)
            layer_fn: Any = layer.forward_peagle
            hidden = self._run_draft_layer(layer_fn, *inputs, position_ids, block_mask)
        return self.norm(hidden) if self.spec.norm_output else hidden
