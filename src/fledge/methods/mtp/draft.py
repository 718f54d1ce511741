"""`MtpDraftModel`: a native multi-token head, the one that a model ships or a new one.

    x = fc [embedding_norm(embedding of token t + 1) ; hidden_norm(the target's state at t)]
    state = norm(one decoder layer of x), which the target's own head reads

In the next step `state` stands for the target's. Embedding and head are the target's tensors. What
differs between the families of heads is in `families.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fledge.methods.eagle3.draft import copy_last_layers
from fledge.methods.mtp.config import MtpConfig
from fledge.methods.mtp.hosted import HostedLayer, hosted_layer
from fledge.methods.shared.borrowing import BorrowingDraftModel
from fledge.methods.shared.layer import DeepDraftLayer, LayerInput, LayerWeights, linear
from fledge.methods.shared.rotary import Rotary
from fledge.methods.shared.unroll import UnrolledDraftModel


class MtpDraftModel(BorrowingDraftModel, UnrolledDraftModel):
    """`config` is a Llama-style transformers config plus the keys of `MtpConfig`."""

    architecture = "FledgeMtpDraftModel"
    config_type = MtpConfig
    spec: MtpConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        spec = self.spec
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.fc = linear(spec.fc_inputs, size)
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        if spec.hosted:
            self.layers = nn.ModuleList([hosted_layer(spec.family, config.layer_config)])
        else:
            self.layers = nn.ModuleList([DeepDraftLayer(spec)])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.rotary = Rotary(config)
        self._init_weights()
        self._borrow_later()

    def _init_weights(self) -> None:
        super()._init_weights()
        gain, parameters = self.spec.family.gain, dict(self.named_parameters())
        for name, parameter in parameters.items():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.constant_(parameter, 1.0 - gain)
            elif parameter.ndim > 2:  # experts
                nn.init.normal_(parameter, std=self.spec.initializer_range)

    def start_as_target(self, model: nn.Module) -> None:
        """Copy the target's last layer and final norm; set fc to pass on the state alone."""
        copy_last_layers(self.layers, self.norm, model)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -self.spec.hidden_size :].fill_diagonal_(1.0)

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., D] the target's states, unchanged: E = D."""
        return aux.to(dtype or self.dtype)

    def embed_at(self, token_N: Tensor, position_N: Tensor, dtype: torch.dtype) -> Tensor:
        embedding_NE = self.embed(token_N, dtype)
        if not self.spec.family.blank_start:
            return embedding_NE
        return embedding_NE.masked_fill((position_N == 0)[:, None], 0.0)

    def norm_weight(self, dtype: torch.dtype) -> Tensor:
        return self._scales(self.norm, dtype)

    def _scales(self, norm: nn.RMSNorm, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies by."""
        gain = self.spec.family.gain
        return (norm.weight + gain if gain else norm.weight).to(dtype)

    @property
    def recordable(self) -> bool:
        return not self.spec.hosted  # experts are chosen on the host

    def unrolled_layers(self, dtype: torch.dtype, rows: int | None = None) -> Sequence[LayerInput]:
        token_EE, state_EE = self.fc.weight.to(dtype).chunk(2, dim=1)
        given: dict[str, Any] = {
            "eps": self.spec.rms_norm_eps,
            "token_norm": self._scales(self.embedding_norm, dtype),
            "token_weight": token_EE,
            "merge_EE": state_EE,
            "merge_norm": self._scales(self.hidden_norm, dtype),
        }
        if self.spec.hosted:
            spec = self.spec
            sizes = (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim)
            return [HostedLayer.of(self.layers[0], dtype, sizes=sizes, **given)]
        [layer] = super().unrolled_layers(dtype, rows)
        assert isinstance(layer, LayerWeights)
        return [replace(layer, **given)]
