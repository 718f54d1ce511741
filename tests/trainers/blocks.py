"""Steps of our block drafters, and the arguments with which other trainers take the same steps."""

import torch
from torch import nn
from transformers import Qwen3Config

from fledge.methods.block.plan import ANCHOR_TOKENS
from objective.naive_block import MASK_ID, Table
from objective.naive_eagle3 import V, _pad, masks_of
from trainers.compared import gradients

LENGTHS, SEED, GAMMA = [9, 1, 2, 6, 3, 13, 21], 11, 3.0
FP64 = torch.float64


def make_ours(kind, draft, **options):
    return kind(
        draft,
        selected_token_ids=torch.arange(V),
        selected_token_mask=torch.ones(V, dtype=torch.bool),
        target_head=Table(V, FP64),
        anchors=ANCHOR_TOKENS // 2,
        gamma=GAMMA,
        **options,
    )


def their_config(draft, **more):
    """A config of theirs for a draft of ours."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "rope_parameters", "block_size", "mask_token_id",
    )  # fmt: skip
    settings = {name: getattr(draft.config, name) for name in names}
    if draft.config.sliding_layers:
        sliding = [i in draft.config.sliding_layers for i in range(len(draft.layers))]
        more["layer_types"] = ["sliding_attention" if x else "full_attention" for x in sliding]
        more |= {"sliding_window": draft.config.sliding_window, "use_sliding_window": True}
    layers = list(range(draft.config.num_aux_hidden_states))
    config = Qwen3Config(**settings, num_target_layers=8, target_layer_ids=layers, **more)
    config.dflash_config = {"mask_token_id": MASK_ID, "target_layer_ids": layers}
    config._attn_implementation = "sdpa"
    return config


def tables():
    """The target's head and embedding as modules."""
    head, embedding = nn.Linear(1, 1, bias=False), nn.Embedding(1, 1)
    for module in (head, embedding):
        module.weight = nn.Parameter(Table(V, FP64).weight, requires_grad=False)
    return head, embedding


def anchors_of(module, batch):
    """Where our blocks start: positions in each row [B, N], and which of them are real."""
    plan = module.plan(masks_of(batch), SEED)
    rows, width = batch["input_ids"].shape
    starts = [[] for _ in range(rows)]
    for slot in sorted(plan.slot_T[plan.blocks.slot_N].tolist()):
        starts[slot // width].append(slot % width + 1)
    count = max(map(len, starts))
    anchors = torch.tensor([row + [0] * (count - len(row)) for row in starts])
    kept = torch.tensor([[i < len(row) for i in range(count)] for row in starts])
    assert kept.sum() > 5
    return anchors, kept


def unshifted(rows, batch):
    """Tokens, loss mask and last states at their own positions, as they take them."""
    width = batch["input_ids"].shape[1]
    return {
        name: _pad([torch.cat([getattr(d, name) for d in row]) for row in rows], width)
        for name in ("ids", "loss", "hidden")
    }


def our_step(module, batch):
    out = module(**batch, seed=SEED)
    out.loss.backward()
    return out, (out.loss.detach(), gradients(module.draft_model))
