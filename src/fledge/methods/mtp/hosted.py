"""A head's layer as transformers has it, of whatever kind the target's own layers are (gated or
latent attention, experts): only its attention is replaced, by that of a rollout or of a cache.
"""

import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fledge.methods.mtp.families import Family
from fledge.methods.shared.layer import Attend, LayerInput
from fledge.methods.shared.rotary import Turn

_ATTENTION = "fledge_mtp"


def hosted_layer(family: Family, values: dict[str, Any]) -> nn.Module:
    """A new layer, given its target's text config: the last of its kinds that attends fully."""
    values = copy.deepcopy(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config._attn_implementation = _ATTENTION
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    index = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
    path, _, name = family.layers[config.model_type].partition(":")
    layer: nn.Module = getattr(import_module(f"transformers.models.{path}"), name)(config, index)
    return layer


def _attention(
    module: nn.Module,
    q_1HNC: Tensor,
    k_1GNC: Tensor,
    v_1GNX: Tensor,
    mask: None,
    *,
    scaling: float,
    attend: Attend,
    **_: Any,
) -> tuple[Tensor, None]:
    """Any attention of transformers in terms of `attend`, which scales by the keys' channels and
    wants as many of them in values."""
    channels, narrow = k_1GNC.shape[-1], v_1GNX.shape[-1]
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HNC, k_1GNC, v_1GNX))
    out_NHC = attend(q * (scaling * channels**0.5), k, F.pad(v, (0, channels - narrow)))
    return out_NHC[None, ..., :narrow], None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)


@dataclass(frozen=True, kw_only=True)
class HostedLayer(LayerInput):
    """Such a layer in the dtype of a step."""

    module: nn.Module
    weights: dict[str, Tensor]
    sizes: tuple[int, int, int]  # query heads, key heads, channels

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype, **given: Any) -> "HostedLayer":
        weights = {name: weight.to(dtype) for name, weight in module.named_parameters()}
        return cls(module=module, weights=weights, **given)

    def through(
        self, state_NE: Tensor, token_N: Tensor | None, turn: Turn, attend: Attend
    ) -> Tensor:
        state_NE, _ = self.enter(state_NE, token_N)
        if len(state_NE) == 0:  # which transformers' layers do not take
            heads, groups, channels = self.sizes
            keys = state_NE.new_empty(0, groups, channels)
            attend(state_NE.new_empty(0, heads, channels), keys, keys)
            return state_NE
        given = {
            "position_embeddings": (turn[0][None], turn[1][None]),
            "attention_mask": None,
            "attend": attend,
        }
        out = functional_call(self.module, self.weights, (state_NE[None],), given)
        state: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return state
