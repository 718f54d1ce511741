"""DFlash 2's convolutions: two around every sublayer of a block, along its slots, gated by input.

    n = norm(x),  d = projection(n) as [2, T, G]
    y_s = sum_t (base[0, t] + d_s[0, t]) n_{s-t}      z = sublayer(y)
    x_s += sum_t (base[1, t] + d_s[1, t]) z_{s-t}     what is before the block counts as 0

with one gate for each group of channels. The context is not convolved. With base[:, 0] = 1 and
everything else 0, as in a new draft, the layer is DFlash's. Shapes: T taps, G groups, P channels of
a group.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.methods.block.config import BlockConfig
from fledge.methods.block.heads.base import cast_linear
from fledge.methods.shared.layer import DeepDraftLayer, LayerWeights, gated_mlp
from fledge.methods.shared.norms import rms_norm


class GatedConvolution(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.taps, size = config.conv_kernel_size, config.hidden_size
        self.groups = size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * self.taps * self.groups, bias=False)

    def start(self) -> None:
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def enter(self, normed_NJE: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input, and the gates [N, J, 2, T, G]."""
        gates = cast_linear(self.kernel_projection, normed_NJE)
        gates = torch.unflatten(gates, -1, (2, self.taps, self.groups))
        return self._mix(0, gates, normed_NJE), gates

    def leave(self, out_NJE: Tensor, gates: Tensor) -> Tensor:
        """What the sublayer's output adds to the state."""
        return self._mix(1, gates, out_NJE)

    def _mix(self, side: int, gates: Tensor, x_NJE: Tensor) -> Tensor:
        x_NJGP = torch.unflatten(x_NJE, -1, (self.groups, -1))
        base_TGP = self.base_kernel[side].to(x_NJE.dtype).view(self.taps, self.groups, -1)
        size, mixed = x_NJE.shape[1], torch.zeros_like(x_NJGP)
        for tap in range(min(self.taps, size)):
            before_NJGP = F.pad(x_NJGP[:, : size - tap], (0, 0, 0, 0, tap, 0))
            mixed = mixed + (base_TGP[tap] + gates[:, :, side, tap, :, None]) * before_NJGP
        return mixed.flatten(-2)


class ConvolvedLayer(DeepDraftLayer):
    """A layer whose block slots pass through convolutions before and after each sublayer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.attention_conv = GatedConvolution(config)
        self.mlp_conv = GatedConvolution(config)

    def project(self, layer: LayerWeights, state_NE: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """q, k and v outputs of the blocks' slots, and the gates for what attention returns."""
        normed_NJE = torch.unflatten(layer.normed(state_NE), 0, (-1, size))
        read_NJE, gates = self.attention_conv.enter(normed_NJE)
        return layer.project(read_NJE.flatten(0, 1), None, slice(None)), gates

    def leave(
        self, layer: LayerWeights, state_NE: Tensor, attended_NHC: Tensor, gates: Tensor
    ) -> Tensor:
        """`LayerWeights.finish` with the convolutions."""
        size = gates.shape[1]
        out_NJE = torch.unflatten(layer.out(attended_NHC.flatten(1)), 0, (-1, size))
        state_NE = state_NE + self.attention_conv.leave(out_NJE, gates).flatten(0, 1)
        normed_NE = rms_norm(state_NE, layer.mlp_norm, layer.eps)
        read_NJE, gates = self.mlp_conv.enter(torch.unflatten(normed_NE, 0, (-1, size)))
        out_NE = gated_mlp(
            read_NJE.flatten(0, 1), layer.gate, layer.up, layer.down,
            recompute=layer.recompute_mlp, once=layer.used_once,
        )  # fmt: skip
        out_NJE = self.mlp_conv.leave(torch.unflatten(out_NE, 0, (-1, size)), gates)
        return state_NE + out_NJE.flatten(0, 1)
