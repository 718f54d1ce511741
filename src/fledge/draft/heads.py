"""From a layer's projection to queries, keys and values: split into heads, normed, rotated."""

import torch
from torch import Tensor

from fledge.draft.norms import rms_norm
from fledge.draft.rotary import rotate
from fledge.kernels.gate import kernel_runs

Turn = tuple[Tensor, Tensor]  # cos and sin, [N, rotated channels] each


def split_heads(
    x_NX: Tensor,  # H query heads, G key heads, G value heads, C channels each
    q_norm_C: Tensor,
    k_norm_C: Tensor,
    turn: Turn,
    *,
    eps: float,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, H, C] and keys [N, G, C], normed per head and rotated, and values [N, G, C]. For
    context without queries, H is 0."""
    channels = len(k_norm_C)
    if kernel_runs(x_NX, what="heads") and turn[0].shape[-1] == channels:
        from fledge.kernels.heads import fused_heads

        return fused_heads(x_NX, q_norm_C, k_norm_C, *turn, eps, groups)
    heads_NHC = x_NX.reshape(len(x_NX), x_NX.shape[1] // channels, channels)
    count = heads_NHC.shape[1] - 2 * groups
    q, k, v = torch.split(heads_NHC, [count, groups, groups], dim=1)
    q, k = rms_norm(q, q_norm_C, eps), rms_norm(k, k_norm_C, eps)
    return rotate(q, *turn), rotate(k, *turn), v
