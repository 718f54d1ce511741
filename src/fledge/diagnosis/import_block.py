"""Convert a block draft of another trainer to ours: the same weights, our config keys."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError  # raised by configs of transformers
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput, first_line
from fledge.diagnosis.block_view import BlockView
from fledge.diagnosis.checks.base import Subject
from fledge.diagnosis.foreign import tokens_marked
from fledge.diagnosis.layouts import OWN_AUX_KEY
from fledge.draft.block import BlockDraftModel, check_block_config
from fledge.draft.files import CONFIG_NAME

_KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "initializer_range", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Taken from the target, even if a trainer saved a copy.
BORROWED = ("embed_tokens.weight", "lm_head.weight")


def build_block(subject: Subject) -> BlockDraftModel:
    """Build the draft in memory, without what it borrows from its target."""
    where, view = subject.directory, subject.view
    assert isinstance(view, BlockView)
    kind = view.setting("markov_head_type", "vanilla")
    if view.spark and kind != "vanilla":
        raise BadInput(f"markov_head_type {kind}: only vanilla is supported", where=str(where))
    if view.setting("is_neox_style", True) is False:
        raise BadInput(
            "is_neox_style is false: our drafts pair halves of the channels",
            where=str(where / CONFIG_NAME),
            fix="permute the rows of q_proj and k_proj, and their norms",
        )
    if view.slides_both_ways:
        raise BadInput(
            "its sliding layers attend both ways inside a block: ours are causal there",
            where=str(where / CONFIG_NAME),
        )
    state = own_block_state(subject)
    dtype = state["fc.weight"].dtype if "fc.weight" in state else torch.float32
    config = own_block_config(subject)
    return BlockDraftModel.from_tensors(config, state, where=where, dtype=dtype).eval()


def own_block_config(subject: Subject) -> Any:
    view = subject.view
    values = {key: view.get(key) for key in _KEPT if view.get(key) is not None}
    values |= {key: view.get(key) for key in _TOKENS}
    ids = subject.aux_layer_ids or []
    values |= {
        "vocab_size": subject.vocab_size,
        "draft_vocab_size": subject.draft_vocab_size or subject.vocab_size,
        "target_hidden_size": int(subject.target.text.hidden_size),
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(ids),
        **view.method_settings,
        OWN_AUX_KEY: ids,
    }
    try:
        config = LlamaConfig(**values)
        check_block_config(config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise BadInput(first_line(error), where=str(subject.directory / CONFIG_NAME)) from None
    return config


def own_block_state(subject: Subject) -> dict[str, Tensor]:
    """The tensors of our draft: no tables of the target, maps only for a reduced vocabulary."""
    state = {name: tensor for name, tensor in subject.view.state.items() if name not in BORROWED}
    width, full = subject.draft_vocab_size or subject.vocab_size, subject.vocab_size
    maps = {name: state.pop(name) for name in ("d2t", "t2d") if name in state}
    if width < full:
        if "d2t" not in maps:
            raise BadInput("no map d2t for a smaller vocabulary", where=str(subject.directory))
        d2t = maps["d2t"].long()
        state |= {"d2t": d2t, "t2d": tokens_marked(d2t + torch.arange(width), full)}
    return state
