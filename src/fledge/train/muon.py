"""Muon for the matrices of a draft, those of one shape all at once.

The definition is `torch.optim.Muon`, which takes matrix after matrix, thirty launches for each: a
GPU would wait for them longer than for a small draft's whole pass. Matrices of one shape, upright
or lying, are one batch here, up to some size: large ones keep a GPU busy, and their copies would
take memory. A bad step changes nothing, and nothing waits for the device.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_BATCH = 2**24  # numbers of a batch, at most; a larger matrix is one by itself


class SkippingMuon(torch.optim.Muon):
    """torch's Muon, its steps as large as AdamW's, with a name for what skips a step."""

    found_inf: Tensor | None = None  # above 0: the step is skipped

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(
            list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "gradients are there before the step"
        for group in self.param_groups:
            for matrices in _alike([p for p in group["params"] if p.grad is not None]):
                self._update(matrices, group)

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        buffers = [self._momentum_buffer(matrix) for matrix in matrices]
        grad_MRC = torch.stack([_lying(matrix.grad) for matrix in matrices])
        taken = grad_MRC.new_ones(())
        if self.found_inf is not None:
            taken = (self.found_inf <= 0).to(grad_MRC.dtype)
            grad_MRC.masked_fill_(taken == 0, 0.0)  # it need not be finite
        momentum, lr = group["momentum"], group["lr"]
        held_MRC = torch.stack([_lying(buffer) for buffer in buffers])
        held_MRC.lerp_(grad_MRC, (1 - momentum) * taken)
        torch._foreach_copy_(list(map(_lying, buffers)), held_MRC.unbind())
        wanted_MRC = grad_MRC.lerp_(held_MRC, momentum) if group["nesterov"] else held_MRC
        way_MRC = _orthogonal(wanted_MRC, group).to(grad_MRC.dtype)
        size = lr * 0.2 * math.sqrt(way_MRC.shape[-1])  # the root mean square of AdamW's steps
        lying = list(map(_lying, matrices))
        torch._foreach_mul_(lying, 1 - lr * group["weight_decay"] * taken)
        torch._foreach_sub_(lying, way_MRC.mul_(size * taken).unbind())

    def _momentum_buffer(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _lying(matrix: Any) -> Tensor:
    """The matrix, or its transpose if that has fewer rows."""
    lying: Tensor = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    return lying


def _alike(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Batches of matrices of one shape."""
    by_shape: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        key = (*sorted(matrix.shape), matrix.dtype, matrix.device)
        by_shape.setdefault(key, []).append(matrix)
    for alike in by_shape.values():
        count = max(1, _BATCH // max(1, alike[0].numel()))
        yield from (alike[begin : begin + count] for begin in range(0, len(alike), count))


def _orthogonal(wanted_MRC: Tensor, group: dict[str, Any]) -> Tensor:
    """Each matrix with its singular values all near 1, by Newton and Schulz's iteration."""
    a, b, c = group["ns_coefficients"]
    x_MRC = wanted_MRC.bfloat16()
    x_MRC /= x_MRC.flatten(1).norm(dim=1)[:, None, None].clamp_min(group["eps"])
    for _ in range(group["ns_steps"]):
        gram_MRR = x_MRC @ x_MRC.mT
        step_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=b, alpha=c)
        x_MRC = torch.baddbmm(x_MRC, step_MRR, x_MRC, beta=a)
    return x_MRC
