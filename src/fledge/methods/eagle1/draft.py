"""`LlamaEagle1DraftModel`: the draft of EAGLE-1 and EAGLE-2 predicts the target's own states.

    state = fc([embedding of token t + 1; the target's last hidden state at t]) -> Llama layers

is an estimate of the target's last hidden state at t + 1. So the target's own head can read it, and
it is fed back in place of the true state to draft further. Neither inputs nor outputs are normed:
the target's state has already been through its final norm.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fledge.core.reading import Maybe, Whole
from fledge.methods.shared.config import EAGLE3_FLAGS, FLAG, DraftConfig, key
from fledge.methods.shared.layer import DeepDraftLayer, DraftLayer, LayerWeights, linear
from fledge.methods.shared.rotary import Rotary
from fledge.methods.shared.unroll import UnrolledDraftModel


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(DraftConfig):
    eagle_version: int | None = key(Maybe(Whole(1, 2)), None)
    fc_bias: bool = key(FLAG, default=False)

    @property
    def fc_inputs(self) -> int:
        return 2 * self.hidden_size  # a token and a state

    def check(self) -> None:
        super().check()
        self.refuse(*EAGLE3_FLAGS, family="EAGLE-1")
        fixed = {
            "draft_vocab_size": self.vocab_size,  # the target's head is the draft's
            "target_hidden_size": self.hidden_size,  # and reads the draft's states
            "num_aux_hidden_states": 1,
        }
        for name, wanted in fixed.items():
            if (value := vars(self)[name]) != wanted:
                raise ValueError(f"{name}: must be {wanted} in EAGLE-1, got {value}")


class LlamaEagle1DraftModel(UnrolledDraftModel):
    """fc over token and state, then Llama layers; embeddings and head are the target's, untrained.

    `config` is a Llama-style transformers config plus `eagle_version` (1 or 2: same weights, but
    EAGLE-2 drafts trees) and `fc_bias` (some drafts of other trainers have one; fledge's do not).
    """

    architecture = "LlamaForCausalLMEagle"

    config_type = Eagle1Config
    spec: Eagle1Config

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        spec = self.spec
        size = spec.hidden_size
        self.embed_tokens = nn.Embedding(spec.vocab_size, size)
        self.fc = nn.Linear(spec.fc_inputs, size, bias=spec.fc_bias)
        deeper = [DeepDraftLayer(spec) for _ in range(spec.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([DraftLayer(spec, normed=False), *deeper])
        self.lm_head = linear(size, spec.draft_vocab_size)
        for shared in (self.embed_tokens, self.lm_head):  # engines use the target's
            shared.weight.requires_grad_(False)
        self._register_vocabulary(spec)
        self.rotary = Rotary(config)
        self._init_weights()

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., D] the target's last hidden states, unchanged: E = D."""
        return aux.to(dtype or self.fc.weight.dtype)

    def norm_weight(self, dtype: torch.dtype) -> None:
        return None

    def layer_weights(
        self, dtype: torch.dtype, *, kept: int | None = None, used_once: bool = False
    ) -> list[LayerWeights]:
        first, *deeper = super().layer_weights(dtype, kept=kept, used_once=used_once)
        token_EE, state_EE = self.fc.weight.to(dtype).chunk(2, dim=1)
        bias = None if self.fc.bias is None else self.fc.bias.to(dtype)
        merged = replace(first, token_weight=token_EE, token_bias=bias, merge_EE=state_EE)
        return [merged, *deeper]
