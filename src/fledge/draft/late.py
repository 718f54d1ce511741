"""Products with weights that are cast where they are used; the casts are not kept.

A bf16 step with fp32 master weights would keep a bf16 copy of every weight between its forward and
backward pass. These products keep only the masters, which exist anyway, and cast them again. The
gradients are those of `F.linear(x, torch.cat([w.to(x.dtype) for w in masters]))`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def stacked(masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights [O, I], concatenated along O and cast in a single pass over each."""
    if len(masters) == 1:
        return masters[0].to(dtype)
    rows = [len(weight) for weight in masters]
    out_OI = masters[0].new_empty((sum(rows), masters[0].shape[1]), dtype=dtype)
    for part, weight in zip(torch.split(out_OI, rows), masters, strict=True):
        part.copy_(weight)
    return out_OI


def master_grads(dout_NO: Tensor, x_NI: Tensor, masters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of each master, computed in the dtype of x, then cast to that of the master."""
    dweight_OI = dout_NO.t() @ x_NI
    parts = torch.split(dweight_OI, [len(weight) for weight in masters])
    return tuple(part.to(weight.dtype) for part, weight in zip(parts, masters, strict=True))


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, *masters)
        return F.linear(x_NI, stacked(masters, x_NI.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *masters = ctx.saved_tensors
        dx_NI = None
        if ctx.needs_input_grad[0]:
            dx_NI = grads[0] @ stacked(masters, x_NI.dtype)
        return dx_NI, *master_grads(grads[0], x_NI, masters)


def late_linear(x_NI: Tensor, masters: Sequence[Tensor]) -> Tensor:
    """[N, O]: x times the masters (concatenated if there are several), in the dtype of x."""
    out_NO: Tensor = _LateLinear.apply(x_NI, *masters)  # type: ignore[no-untyped-call]
    return out_NO
