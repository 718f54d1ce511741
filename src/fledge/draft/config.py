"""What a draft's config must hold, checked when a draft is built."""

from typing import Any

from fledge.draft.rotary import STATIC_ROPE_TYPES, rope_parameters

# Keys beyond transformers' own Llama config, with what their absence means.
_FLAGS = {
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
    """Which key says how many tokens a draft was trained to propose: each method's own word."""
    if getattr(config, "eagle_version", None) is not None:
        return "draft_tokens"
    return "num_depths" if config.parallel_drafting else "ttt_steps"


def trained_depths(config: Any) -> int | None:
    """How many tokens a draft was trained to propose, if its config says (older ones do not)."""
    depths: int | None = getattr(config, depths_key(config), None)
    return depths


def check_draft_config(config: Any) -> None:
    """Fill in what is absent, refuse what a draft cannot be."""
    derived = {
        "target_hidden_size": config.hidden_size,
        "draft_vocab_size": config.vocab_size,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
    }
    for name, absent in (_FLAGS | derived).items():
        if getattr(config, name, None) is None:
            setattr(config, name, absent)
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
