"""Block drafts for the tiny target of tests/export: random, but with peaked predictions."""

from pathlib import Path

import torch
from transformers import LlamaConfig

from fledge.methods.block.draft import BlockDraftModel
from fledge.target.hf.model import HFEagle3TargetModel

_DSPARK = {"sample_from_anchor": True, "markov_rank": 8, "confidence_head": True}
_DFLASH2 = {
    "candidate_head": "selector", "candidates": 8, "selector_rank": 8, "conv_kernel_size": 2,
    "conv_group_size": 8,
}  # fmt: skip
_LILICORR = {
    "candidate_head": "lilicorr", "candidates": 4, "lilicorr_num_heads": 4,
    "lilicorr_factor_dim": 8, "lilicorr_hidden_size": 16,
}  # fmt: skip
KINDS = {
    "dflash": {},
    "dflash, small vocabulary": {"draft_vocab_size": 90},
    "dflash, causal": {"causal": True},
    "dflash, sliding": {"sliding_layers": [0, 1], "sliding_window": 6},
    "dspark": _DSPARK,
    "dspark, small vocabulary": {**_DSPARK, "draft_vocab_size": 90},
    "dspark without confidence": {**_DSPARK, "confidence_head": False},
    "dflash2": _DFLASH2,
    "dflash2, windows both ways": {
        **_DFLASH2, "sliding_layers": [0, 1], "sliding_window": 6, "sliding_both_ways": True,
    },
    "lilicorr": _LILICORR,
    "lilicorr with convolutions": {**_LILICORR, "conv_kernel_size": 2, "conv_group_size": 8},
    "domino": {
        "token_head": "domino", "markov_rank": 8, "gru_hidden_dim": 12, "sample_from_anchor": True,
    },
}  # fmt: skip


def block_config(**options) -> LlamaConfig:
    values = {
        "vocab_size": 400, "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": 0, "draft_vocab_size": 400, "block_size": 5,
        "mask_token_id": 3, "aux_layer_ids": [0, 2], "num_aux_hidden_states": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    return LlamaConfig(**values | options)


def make_block(directory: Path, *, seed: int = 0, **options) -> Path:
    """Write a random draft to disk."""
    torch.manual_seed(seed)
    draft = BlockDraftModel(block_config(**options))
    if draft.config.draft_vocab_size < 400:
        ids = torch.randperm(400)[: draft.config.draft_vocab_size].sort().values
        mask = torch.zeros(400, dtype=torch.bool)
        mask[ids] = True
        draft.set_vocab_mapping(ids, mask)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * (0.2 if weight.ndim > 1 else 0.1))
    draft.save_pretrained(directory)
    return directory


def whole_block(directory: Path, target: Path) -> BlockDraftModel:
    """A draft from disk, completed with its target's embedding and head."""
    draft = BlockDraftModel.from_pretrained(directory)
    backend = HFEagle3TargetModel.from_pretrained(
        target, aux_layer_ids=[0, 2], num_aux_layers=2, device="cpu"
    )
    draft.borrow_from(backend)
    return draft.eval()
