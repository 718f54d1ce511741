"""Checks of a draft's config: in its file, against its tensors, and when a draft is built."""

from collections.abc import Mapping
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.expected import Flag, ListOf, Maybe, Number, Table, Text, Whole
from fledge.draft.rotary import STATIC_ROPE_TYPES, rope_parameters

_SIZE = Whole(1, 2**24)
_MAX_CHANNELS = 2**24  # of all heads
_TOKEN = Maybe(Whole(0, _SIZE.high))
_POSITIVE = Number(1e-30, 1e30)
_ROTARY = Table(
    optional={
        "rope_type": Text(64),
        "type": Text(64),
        "truncate": Maybe(Flag()),
        "original_max_position_embeddings": Maybe(Whole(1)),
        "partial_rotary_factor": Maybe(Number(1e-6, 1)),
        "rope_theta": Maybe(Number(1e-30, 1e30)),
        **dict.fromkeys(
            ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast",
             "beta_slow", "mscale", "mscale_all_dim"), Maybe(Number(-1e30, 1e30)),
        ),
    }
)  # fmt: skip
# The schema of config.json: every key that determines a draft's size or computation.
CONFIG_FILE = Table(
    optional={
        "vocab_size": _SIZE,
        "hidden_size": _SIZE,
        "intermediate_size": _SIZE,
        "num_hidden_layers": Whole(1, 2**10),
        "num_attention_heads": _SIZE,
        "num_key_value_heads": Maybe(_SIZE),
        "head_dim": Maybe(_SIZE),
        "draft_vocab_size": Maybe(_SIZE),
        "target_hidden_size": Maybe(_SIZE),
        "num_aux_hidden_states": Maybe(Whole(1, 2**10)),
        "max_position_embeddings": Whole(1),
        "aux_layer_ids": Maybe(ListOf(Whole(0, 2**16), most=2**10)),
        "mask_token_id": _TOKEN,
        "block_size": Maybe(Whole(1, 2**10)),
        "sliding_window": Maybe(Whole(1, 2**31)),
        "sliding_layers": Maybe(ListOf(Whole(0, 2**10), most=2**10)),
        "markov_rank": Maybe(Whole(0, 2**14)),
        "confidence_threshold": Maybe(Number(0, 1)),
        "confidence_temperatures": Maybe(ListOf(Number(1e-6, 1e6), most=2**10)),
        "bos_token_id": _TOKEN,
        "pad_token_id": _TOKEN,
        "hidden_act": Text(64),
        "rms_norm_eps": Number(0, 1),
        "initializer_range": Number(0, 1e3),
        "rope_theta": Maybe(_POSITIVE),
        "partial_rotary_factor": Maybe(Number(1e-6, 1)),
        "rope_parameters": Maybe(_ROTARY),
        "rope_scaling": Maybe(_ROTARY),
        **dict.fromkeys(
            ("fc_norm", "norm_output", "norm_before_residual", "parallel_drafting",
             "attention_bias", "mlp_bias", "tie_word_embeddings", "causal", "sample_from_anchor",
             "confidence_head"), Maybe(Flag()),
        ),
    },
)  # fmt: skip

# Keys beyond those of transformers' Llama config, with their defaults.
_DEFAULTS = {
    "num_aux_hidden_states": 3,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": False,
    "parallel_drafting": False,
    "mask_token_id": None,
    "attention_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
}


def depths_key(config: Any) -> str:
    """The key for the number of tokens that a draft was trained to propose: it depends on the
    method."""
    if any(getattr(config, name, None) is not None for name in ("eagle_version", "block_size")):
        return "draft_tokens"
    return "num_depths" if config.parallel_drafting else "ttt_steps"


def trained_depths(config: Any) -> int | None:
    """How many tokens a draft was trained to propose; None for older configs."""
    depths: int | None = getattr(config, depths_key(config), None)
    return depths


def check_draft_config(config: Any) -> None:
    """Fill in defaults; raise ValueError for settings that a draft cannot have."""
    derived = {
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.vocab_size,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
    }
    for name, default in (_DEFAULTS | derived).items():
        if getattr(config, name, None) is None:
            setattr(config, name, default)
    if not 0 < config.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size: must be in 1..{config.vocab_size}, got {config.draft_vocab_size}"
        )
    mask_id = config.mask_token_id
    if mask_id is not None and not 0 <= mask_id < config.vocab_size:
        raise ValueError(f"mask_token_id: must be in 0..{config.vocab_size - 1}, got {mask_id}")
    for name in ("num_hidden_layers", "num_aux_hidden_states"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: must be positive, got {getattr(config, name)}")
    depths = trained_depths(config)
    if depths is not None and (type(depths) is not int or depths < 1):
        raise ValueError(f"{depths_key(config)}: must be a positive int, got {depths!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads: {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.num_attention_heads * config.head_dim > _MAX_CHANNELS:
        raise ValueError(
            f"head_dim: {config.num_attention_heads} heads of {config.head_dim} are too many"
        )
    if config.hidden_act != "silu":
        raise ValueError(
            f"hidden_act: engines load drafts with 'silu' alone, got {config.hidden_act!r}; a "
            "draft's activation need not be its target's"
        )
    for name in ("attention_bias", "mlp_bias"):
        if config.qk_norm and getattr(config, name):
            raise ValueError(f"{name}: no engine loads a draft with it and qk_norm; leave one out")
    kind = rope_parameters(config)["rope_type"]
    if kind not in STATIC_ROPE_TYPES:
        raise ValueError(
            f"rope_parameters: rope_type {kind!r} depends on the sequence's length; "
            f"use one of {', '.join(STATIC_ROPE_TYPES)}"
        )


def check_config_fits(config: Any, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> None:
    """Refuse sizes that contradict the shapes in the weights' header, before any memory is
    allocated for them. The full set of tensors depends on the draft's class, and is compared with a
    draft on the meta device (`check_tensors`)."""
    width = config.hidden_size
    fc_inputs = config.num_aux_hidden_states * config.target_hidden_size
    if getattr(config, "eagle_version", None) is not None:
        fc_inputs = 2 * width  # a token and a state
    expected = {
        "embed_tokens.weight": (config.vocab_size, width),
        "lm_head.weight": (config.draft_vocab_size, width),
        "fc.weight": (width, fc_inputs),
    }
    faults = [
        f"{name} {shapes[name]} not {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if faults:
        what = f"tensors of another shape than config.json says: {', '.join(faults)}"
        raise BadInput(what, where=where, fix="config.json and the weights are of two drafts")
