"""Start a P-EAGLE draft from an EAGLE-3 draft."""

from typing import Any

import torch

from fledge.core.errors import BadInput
from fledge.draft.eagle3 import LlamaEagle3DraftModel
from fledge.draft.layer import DeepDraftLayer
from fledge.draft.rotary import rope_parameters

# Settings that must be equal for a tensor to have the same meaning in both drafts.
_SHARED = (
    "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_aux_hidden_states", "fc_norm",
    "rms_norm_eps", "norm_before_residual", "attention_bias", "mlp_bias", "qk_norm",
)  # fmt: skip


@torch.no_grad()
def peagle_from_eagle3(draft: LlamaEagle3DraftModel, config: Any) -> LlamaEagle3DraftModel:
    """A draft with `config` (with `parallel_drafting`) that takes all weights of `draft`: fc, its
    layers, norm, head, embeddings and vocabulary map. `mask_hidden` and additional layers are new.

    A new layer starts with its two output projections at zero, so at depth 0 the new draft gives
    exactly the old one's output: a warm start loses nothing.
    """
    new = LlamaEagle3DraftModel(config)
    if not new.config.parallel_drafting:
        raise ValueError("parallel_drafting: must be set in the config of a P-EAGLE draft")
    pairs = {name: (getattr(draft.config, name), getattr(new.config, name)) for name in _SHARED}
    pairs["rope_parameters"] = (rope_parameters(draft.config), rope_parameters(new.config))
    for name, (old_value, new_value) in pairs.items():
        if old_value != new_value:
            raise BadInput(
                f"the draft to start from has {name} {old_value}, the new one {new_value}",
                where="draft.init_from",
                fix=f"use {name} {old_value}",
            )
    if len(new.layers) < len(draft.layers):
        raise BadInput(
            f"the draft to start from has {len(draft.layers)} layers, the new one only "
            f"{len(new.layers)}",
            where="draft.init_from",
            fix=f"use at least {len(draft.layers)} layers",
        )
    for layer in new.layers[len(draft.layers) :]:
        assert isinstance(layer, DeepDraftLayer)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    reference = draft.fc.weight
    new.to(device=reference.device, dtype=reference.dtype)
    new.load_state_dict(new.state_dict() | draft.state_dict())
    return new
