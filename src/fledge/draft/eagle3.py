"""`LlamaEagle3DraftModel`: the draft network of EAGLE-3, EAGLE-3.1 and P-EAGLE.

Its rollout in training is in `unroll.py`, P-EAGLE's in `parallel.py`. P-EAGLE's placeholder and its
pass through flex attention come from `compat.peagle_draft`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.compat.peagle_draft import _PeagleDraftMixin
from fledge.draft.config import check_draft_config
from fledge.draft.layer import DeepDraftLayer, FusedDraftLayer, linear
from fledge.draft.norms import rms_norm
from fledge.draft.rotary import Rotary
from fledge.draft.target_layer import start_as_target
from fledge.draft.unroll import UnrolledDraftModel


class LlamaEagle3DraftModel(_PeagleDraftMixin, UnrolledDraftModel):
    """fc over the target's aux states, a fused first layer, deeper Llama layers, norm, head.

    `config` is a Llama-style transformers config plus `draft_vocab_size`, `target_hidden_size`,
    `num_aux_hidden_states`, `fc_norm`, `norm_output`, and for P-EAGLE `parallel_drafting` and
    `mask_token_id` (all optional, see `check_draft_config`).
    """

    architecture = "LlamaForCausalLMEagle3"

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_draft_config(config)
        self.config = config
        aux, size, eps = config.num_aux_hidden_states, config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = linear(aux * config.target_hidden_size, size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(aux)
            )
        deeper = [DeepDraftLayer(config) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([FusedDraftLayer(config), *deeper])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = linear(size, config.draft_vocab_size)
        self._register_vocabulary(config)
        if config.parallel_drafting:
            self._init_peagle_parameters(config)
        self.rotary = Rotary(config)
        self._init_weights()

    # --- the pieces ----------------------------------------------------------------------------

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., 3 * D] aux states of the target -> [..., E]."""
        dtype = dtype or self.fc.weight.dtype
        return F.linear(self.fc_inputs(aux.to(dtype)), self.fc.weight.to(dtype))

    def fc_inputs(self, aux: Tensor) -> Tensor:
        """[..., 3 * D] aux states as fc reads them: each layer's normed separately if `fc_norm`."""
        if not self.config.fc_norm:
            return aux
        chunks = aux.chunk(self.config.num_aux_hidden_states, dim=-1)
        return torch.cat(
            [
                rms_norm(chunk, weight.to(aux.dtype), self.config.rms_norm_eps)
                for chunk, weight in zip(chunks, self.fc_norm.parameters(), strict=True)
            ],
            dim=-1,
        )

    def start_as_target(self, model: nn.Module) -> None:
        start_as_target(self, model)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., E] as carried from depth to depth -> [..., W]. Normed here unless `norm_output`,
        with which the carried states are already normed."""
        if not self.config.norm_output:
            hidden = self.norm(hidden)
        return F.linear(hidden, self.lm_head.weight)

    def norm_weight(self, dtype: torch.dtype) -> Tensor:
        return self.norm.weight.to(dtype)
