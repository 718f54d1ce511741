"""Muon for the matrices of a draft, batched by shape.

The update is that of `torch.optim.Muon`, which processes one matrix at a time with thirty kernel
launches each: for a small draft, these take longer than its whole pass. Here, matrices of one shape
(or its transpose) form one batch, up to a size limit: large matrices keep a GPU busy on their own,
and stacking them would cost memory. A bad step changes nothing, and nothing synchronizes with the
device.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BATCH = 2**24  # maximum number of elements in a batch; a larger matrix is a batch of its own


class SkippingMuon(torch.optim.Muon):
    """torch's Muon with steps scaled to the size of AdamW's, and `found_inf` to skip a step."""

    found_inf: Tensor | None = None  # above 0: the step is skipped

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(
            list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            for matrices in _batches([p for p in group["params"] if p.grad is not None]):
                self._update(matrices, group)

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        buffers = [self._momentum_buffer(matrix) for matrix in matrices]
        grad_MRC = torch.stack([_wide(matrix.grad) for matrix in matrices])
        taken = grad_MRC.new_ones(())
        if self.found_inf is not None:
            taken = (self.found_inf <= 0).to(grad_MRC.dtype)
            grad_MRC.masked_fill_(taken == 0, 0.0)  # a skipped gradient may not be finite
        momentum, lr = group["momentum"], group["lr"]
        momentum_MRC = torch.stack([_wide(buffer) for buffer in buffers])
        momentum_MRC.lerp_(grad_MRC, (1 - momentum) * taken)
        torch._foreach_copy_(list(map(_wide, buffers)), momentum_MRC.unbind())
        update_MRC = grad_MRC.lerp_(momentum_MRC, momentum) if group["nesterov"] else momentum_MRC
        direction_MRC = _orthogonal(update_MRC, group).to(grad_MRC.dtype)
        size = lr * 0.2 * math.sqrt(direction_MRC.shape[-1])  # matches the RMS of AdamW's steps
        weights = list(map(_wide, matrices))
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * taken)
        torch._foreach_sub_(weights, direction_MRC.mul_(size * taken).unbind())

    def _momentum_buffer(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _wide(matrix: Any) -> Tensor:
    """The matrix, or its transpose if that has fewer rows."""
    wide: Tensor = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    return wide


def _batches(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield batches of matrices of one shape."""
    by_shape: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        key = (*sorted(matrix.shape), matrix.dtype, matrix.device)
        by_shape.setdefault(key, []).append(matrix)
    for same_shape in by_shape.values():
        count = max(1, _BATCH // max(1, same_shape[0].numel()))
        yield from (same_shape[begin : begin + count] for begin in range(0, len(same_shape), count))


def _orthogonal(update_MRC: Tensor, group: dict[str, Any]) -> Tensor:
    """Each matrix with all its singular values near 1, by Newton-Schulz iteration."""
    a, b, c = group["ns_coefficients"]
    x_MRC = update_MRC.bfloat16()
    x_MRC /= x_MRC.flatten(1).norm(dim=1)[:, None, None].clamp_min(group["eps"])
    for _ in range(group["ns_steps"]):
        gram_MRR = x_MRC @ x_MRC.mT
        step_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=b, alpha=c)
        x_MRC = torch.baddbmm(x_MRC, step_MRR, x_MRC, beta=a)
    return x_MRC
