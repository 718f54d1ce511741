"""Linear layers on a CPU, with weights in the layout that its matrix instructions read.

Decoding multiplies one to eight rows by every weight of the target. torch's own product rearranges
the whole weight at each call (bfloat16), or runs on one core and costs twice as much for two to
four rows as for one (float32). Here weights are rearranged once, by oneDNN, which torch brings; a
pass over four tokens then costs about as much as one over a single token. In bfloat16 the products
are the same bits. The price is a second copy of the weights.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.machine import multiplies_bfloat16

_MOST_ROWS = 16  # passes over more are as fast with the usual layout
_MOST_BYTES = 4 * 2**30  # of a model's weights: a larger one is left as it is
_MACHINES = ("x86_64", "AMD64")

Forward = Callable[[Tensor], Tensor]


class _Packed(NamedTuple):
    weight: Tensor
    version: int  # of the weight when it was packed: training changes weights in place
    forward: Forward


_PACKED: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()  # shared by all decoders


class PackedLinears:
    """A model's plain linear layers."""

    def __init__(self, model: nn.Module) -> None:
        linears = [m for m in model.modules() if type(m) is nn.Linear and _is_plain(m)]
        weights = {id(linear.weight): linear.weight for linear in linears}
        size = sum(weight.nbytes for weight in weights.values())
        self._linears = linears if size <= _MOST_BYTES else []

    @property
    def any(self) -> bool:
        return bool(self._linears)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While open, the layers compute with packed weights; without gradients only."""
        for linear in self._linears:
            linear.__dict__["forward"] = _forward_of(linear)  # as an attribute, but faster
        try:
            yield
        finally:
            for linear in self._linears:
                del linear.__dict__["forward"]


def _is_plain(linear: nn.Linear) -> bool:
    """Whether nobody changed it, and this CPU multiplies its dtype."""
    weight = linear.weight
    fits = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and multiplies_bfloat16()
    )
    here = platform.machine() in _MACHINES and torch._C._has_mkldnn
    own = "forward" not in vars(linear) and type(weight.data) is Tensor
    return fits and here and own and weight.device.type == "cpu"


def _forward_of(linear: nn.Linear) -> Forward:
    packed = _PACKED.get(linear)
    weight = linear.weight
    if packed is None or packed.weight is not weight or packed.version != weight._version:
        packed = _Packed(weight, weight._version, _pack(weight, linear.bias))
        _PACKED[linear] = packed
    return packed.forward


@torch.no_grad()
def _pack(weight: Tensor, bias: Tensor | None) -> Forward:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _MOST_ROWS // 4)
    multiply = torch.ops.mkldnn._linear_pointwise
    most = _MOST_ROWS * weight.shape[1]

    def forward(rows: Tensor) -> Tensor:
        if rows.numel() > most or rows.dtype != weight.dtype:
            return F.linear(rows, weight, bias)
        product: Tensor = multiply(rows, packed, bias, "none", [], "")
        return product

    return forward
