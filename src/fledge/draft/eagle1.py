"""`LlamaEagle1DraftModel`: the draft of EAGLE-1 and EAGLE-2 predicts the target's own states.

    state = fc([embedding of token t + 1; the target's last hidden state at t]) -> Llama layers

is an estimate of the target's last hidden state at t + 1. So the target's own head can read it, and
it is fed back in place of the true state to draft further. Neither inputs nor outputs are normed:
the target's state has already been through its final norm.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fledge.draft.config import check_draft_config
from fledge.draft.layer import DeepDraftLayer, LayerWeights, MergedDraftLayer, linear
from fledge.draft.rotary import Rotary
from fledge.draft.unroll import UnrolledDraftModel


class LlamaEagle1DraftModel(UnrolledDraftModel):
    """fc over token and state, then Llama layers; embeddings and head are the target's, untrained.

    `config` is a Llama-style transformers config plus `eagle_version` (1 or 2: same weights, but
    EAGLE-2 drafts trees) and `fc_bias` (some drafts of other trainers have one; fledge's do not).
    """

    architecture = "LlamaForCausalLMEagle"

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_draft_config(config)
        _check_eagle1(config)
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        deeper = [DeepDraftLayer(config) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([MergedDraftLayer(config), *deeper])
        self.lm_head = linear(size, config.draft_vocab_size)
        for shared in (self.embed_tokens, self.lm_head):  # engines use the target's
            shared.weight.requires_grad_(False)
        self._register_vocabulary(config)
        self.rotary = Rotary(config)
        self._init_weights()

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., D] the target's last hidden states, unchanged: E = D."""
        return aux.to(dtype or self.fc.weight.dtype)

    def norm_weight(self, dtype: torch.dtype) -> None:
        return None

    def layer_weights(
        self, dtype: torch.dtype, *, recompute_mlp: bool = False
    ) -> list[LayerWeights]:
        first, *deeper = super().layer_weights(dtype, recompute_mlp=recompute_mlp)
        token_EE, state_EE = self.fc.weight.to(dtype).chunk(2, dim=1)
        bias = None if self.fc.bias is None else self.fc.bias.to(dtype)
        merged = replace(first, token_weight=token_EE, token_bias=bias, merge_EE=state_EE)
        return [merged, *deeper]


def _check_eagle1(config: Any) -> None:
    """Check the requirements that are specific to EAGLE-1."""
    if not hasattr(config, "fc_bias"):
        config.fc_bias = False
    for name, wanted in {
        "draft_vocab_size": config.vocab_size,  # the target's head is the draft's
        "target_hidden_size": config.hidden_size,  # and reads the draft's states
        "num_aux_hidden_states": 1,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
        "parallel_drafting": False,
    }.items():
        if getattr(config, name) != wanted:
            raise ValueError(f"{name}: must be {wanted} in EAGLE-1, got {getattr(config, name)}")
