"""P-EAGLE's visibility as a flex-attention mask, and attention with that mask.

An alternative to `parallel.py` for callers who flatten their elements themselves (the interface of
the draft's `forward_peagle`): any order of elements, one mask. Flex attention is compiled where
Inductor supports the tensors; elsewhere, and after a failed compilation, the scores are dense.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

logger = logging.getLogger(__name__)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_MIN_CHANNELS = 16  # smallest head dimension that Inductor's kernels support
_COMPILED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    document_N = _documents(anchor_N, lengths, total_seq_len)

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = (document_N[q] == document_N[kv]) & (document_N[q] >= 0)
        prefix = (depth_N[kv] == 0) & (anchor_N[kv] <= anchor_N[q])
        rollout = (anchor_N[kv] == anchor_N[q]) & (depth_N[kv] <= depth_N[q])
        return same & (prefix | rollout)

    return mask_mod


def _documents(anchor_N: Tensor, lengths: Tensor | Sequence[int], total_seq_len: int) -> Tensor:
    """[N] the document of each anchor, -1 for padding (and for anchors outside the row)."""
    lengths_J = torch.as_tensor(lengths, device=anchor_N.device).reshape(-1)
    end_J = torch.cumsum(lengths_J, dim=0)
    if len(end_J) and int(end_J[-1]) > total_seq_len:
        raise ValueError(f"lengths: sum to {int(end_J[-1])}, more than {total_seq_len}")
    document_N = torch.searchsorted(end_J, anchor_N, right=True)
    inside_N = (anchor_N >= 0) & (document_N < len(end_J))
    return torch.where(inside_N, document_N, -1)


def peagle_block_mask(
    anchor_pos: Tensor, depth: Tensor, lengths: Tensor | Sequence[int], total_seq_len: int
) -> BlockMask:
    """`create_peagle_mask_mod` as a block mask over N x N elements, for every row and head."""
    mask_mod = create_peagle_mask_mod(anchor_pos, depth, lengths, total_seq_len)
    count, device = anchor_pos.numel(), anchor_pos.device
    return create_block_mask(mask_mod, None, None, count, count, device=str(device))


class _Compiled:
    """Flex attention, compiled once per process, and the error if its compilation failed."""

    function: Callable[..., Any] | None = None
    failure: str | None = None


def compile_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether Inductor's flex-attention lowering supports these tensors."""
    return (
        q.device.type == "cuda"
        and {k.device, v.device} == {q.device}
        and q.dtype in _COMPILED_DTYPES
        and {k.dtype, v.dtype} == {q.dtype}
        and min(q.shape[-1], v.shape[-1]) >= _MIN_CHANNELS
    )


def peagle_flex_attention(
    q_BHNC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, block_mask: BlockMask, scale: float
) -> Tensor:
    """Attention output [B, H, N, C]; elements that see nothing (padding) get zeros."""
    if _Compiled.failure is None and compile_supported(q_BHNC, k_BGNC, v_BGNC):
        if _Compiled.function is None:
            _Compiled.function = torch.compile(flex_attention, dynamic=True)
        try:
            out: Tensor = _Compiled.function(
                q_BHNC, k_BGNC, v_BGNC, block_mask=block_mask, scale=scale, enable_gqa=True
            )
            return out
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what Dynamo, Inductor and Triton raise
            _Compiled.failure = f"{type(error).__name__}: {error}"
            logger.warning("flex attention is not compiled, dense from now on: %s", error)
    return _dense_attention(q_BHNC, k_BGNC, v_BGNC, block_mask, scale)


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
