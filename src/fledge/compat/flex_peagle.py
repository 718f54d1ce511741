"""P-EAGLE's visibility as a flex-attention mask, for elements in any order.

`peagle_draft.py` attends with it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

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
