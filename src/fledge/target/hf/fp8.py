"""A target whose linear layers multiply in 8 bits: half the time on a GPU that supports it.

Weights are stored as float8 (e4m3) with one scale per output channel, activations are rounded on
the fly with one scale per token: scale * float8 comes within 2^-4 of every number down to 2^-15 of
the row's largest. `Fp8Linear.reference` is the definition. Embeddings and the head are not
converted. This changes what a draft learns: docs/performance.md has the measured effect.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.target.layers import find_layers

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def rounded(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [N, D], scale [N, 1] fp32), whose product approximates x."""
    scale_N1 = x_ND.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x_ND.float() / scale_N1).clamp(-LARGEST, LARGEST).to(FLOAT8), scale_N1


class Fp8Linear(nn.Module):
    """A replacement for `nn.Linear`."""

    scale_O1: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OD, scale_O1 = rounded(linear.weight.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_OD = nn.Parameter(weight_OD, requires_grad=False)
        self.register_buffer("scale_O1", scale_O1)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x_ND = x.reshape(-1, self.in_features)
        out_NO = self._product(x_ND) if x.is_cuda else self.reference(x_ND)
        if self.bias is not None:
            out_NO = out_NO + self.bias
        return out_NO.view(*x.shape[:-1], self.out_features)

    def reference(self, x_ND: Tensor) -> Tensor:
        x8_ND, scale_N1 = rounded(x_ND)
        products_NO = F.linear(x8_ND.float(), self.weight_OD.float())
        return (products_NO * scale_N1 * self.scale_O1.t()).to(x_ND.dtype)

    def _product(self, x_ND: Tensor) -> Tensor:
        x8_ND, scale_N1 = rounded(x_ND)
        out_NO: Tensor = torch._scaled_mm(
            x8_ND,
            self.weight_OD.t(),
            scale_a=scale_N1,
            scale_b=self.scale_O1.t(),
            out_dtype=torch.bfloat16,  # the only one it supports with scales per row
            use_fast_accum=True,
        )
        return out_NO.to(x_ND.dtype)


def convert_linears(model: nn.Module) -> int:
    """Replace every linear of the decoder layers with `Fp8Linear`; returns how many."""
    replaced = 0
    for layer in find_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and _fits(child):
                    setattr(parent, name, Fp8Linear(child))
                    replaced += 1
    return replaced


def _fits(linear: nn.Linear) -> bool:
    """Whether the sizes are multiples of 16, as the GPU product requires."""
    return linear.in_features % 16 == 0 and linear.out_features % 16 == 0


def why_not(device: torch.device) -> str | None:
    """Why fp8 cannot run on this device; None when it can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8 units"
    return None
