"""Matrix products on a CPU in float32, through oneDNN.

torch multiplies float32 with MKL, which uses half of what an AMD processor can do: on one with
AVX-512, oneDNN takes 0.45 of its time. In bfloat16 torch uses oneDNN itself. Small products, other
dtypes and other devices are torch's own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FEWEST = 2**22  # multiplications; oneDNN compiles a kernel for every new shape
_ROWS = 8192
_linear_pointwise: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _is_large(a_NK: Tensor, width: int) -> bool:
    return (
        a_NK.dtype == torch.float32
        and a_NK.device.type == "cpu"
        and a_NK.ndim == 2
        and a_NK.numel() * width >= _FEWEST
        and _linear_pointwise is not None
        and torch._C._has_mkldnn
    )


def matmul(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """a @ b, which autograd does not see."""
    if not _is_large(a_NK, b_KM.shape[1]):
        return a_NK @ b_KM
    product: Tensor = _linear_pointwise(_dense(a_NK), _dense(b_KM).t(), None, "none", [], "")
    return product


def _dense(x_NK: Tensor) -> Tensor:
    """x without gaps: with a part of a wider matrix, oneDNN takes a thousand times as long."""
    return x_NK if x_NK.is_contiguous() or x_NK.t().is_contiguous() else x_NK.contiguous()


def add_product(into_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """into += a @ b, which autograd does not see; returns `into`. The products are added
    some rows at a time: together they would need as much memory as `into`."""
    if not _is_large(a_NK, b_KM.shape[1]):
        return into_NM.addmm_(a_NK, b_KM)
    for begin in range(0, len(into_NM), _ROWS):
        rows = slice(begin, begin + _ROWS)
        into_NM[rows] += matmul(a_NK[rows], b_KM)
    return into_NM


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return matmul(x_NI, weight_OI.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_NO,) = grads
        x_NI, weight_OI = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        dx_NI = matmul(dout_NO, weight_OI) if need_x else None
        return dx_NI, matmul(dout_NO.t(), x_NI) if need_weight else None


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, differentiable."""
    if bias_O is not None or not _is_large(x_NI, len(weight_OI)):
        return F.linear(x_NI, weight_OI, bias_O)
    out_NO: Tensor = _Linear.apply(x_NI, weight_OI)  # type: ignore[no-untyped-call]
    return out_NO


def linear_onto(base_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """base + `linear`."""
    if not _is_large(x_NI, len(weight_OI)):
        return torch.addmm(base_NO, x_NI, weight_OI.t())
    return base_NO + linear(x_NI, weight_OI)
