"""A draft's config: its schema in files, its typed form that a draft computes with, and its checks.

Users and files see a transformers config, `draft.config`. When a draft is built, `DraftConfig.of`
reads and checks it once; a family with more keys has a subclass.
"""

import logging
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from transformers import PretrainedConfig

from fledge.core.errors import BadInput
from fledge.core.reading import Flag, ListOf, Maybe, Number, Table, Text, Whole
from fledge.methods.shared.rotary import STATIC_ROPE_TYPES, rope_parameters

log = logging.getLogger(__name__)

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
        "token_head": Maybe(Text(64)),
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

# One of them at least is in every draft's config, none in a target's.
_OWN_KEYS = (
    *("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "fc_norm", "norm_output"),
    *("parallel_drafting", "eagle_version", "block_size"),
)
_MOST_LAYERS = 8  # of the drafts in use


def depths_key(config: PretrainedConfig) -> str:
    """The key for the number of tokens that a draft was trained to propose: it depends on the
    method."""
    if any(getattr(config, name, None) is not None for name in ("eagle_version", "block_size")):
        return "draft_tokens"
    return "num_depths" if config.parallel_drafting else "ttt_steps"


def trained_depths(config: PretrainedConfig) -> int | None:
    """How many tokens a draft was trained to propose; None for older configs."""
    depths: int | None = getattr(config, depths_key(config), None)
    return depths


def _warn_of_targets_layers(config: PretrainedConfig) -> None:
    """Warn of a target's config in place of a draft's: nothing else limits the number of layers."""
    layers = config.num_hidden_layers
    known = any(getattr(config, key, None) is not None for key in _OWN_KEYS)
    if layers > (_MOST_LAYERS if known else 1):
        log.warning(
            "a draft of %d layers: is num_hidden_layers its target's? Drafts have 1 to %d "
            "(fledge.derive_draft_config makes a draft's config from a target's)",
            layers,
            _MOST_LAYERS,
        )


# The flags of EAGLE-3's own computation, which no other family has.
EAGLE3_FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "parallel_drafting")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft of any family computes with, whatever becomes of `draft.config` later."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    rms_norm_eps: float
    initializer_range: float
    # keys beyond those of transformers' Llama config, with their defaults
    num_aux_hidden_states: int = 3
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    parallel_drafting: bool = False
    mask_token_id: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    # by default those of the other keys: see `of`
    target_hidden_size: int
    draft_vocab_size: int
    head_dim: int
    num_key_value_heads: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Read a config. Missing keys are set to their defaults in it, so that files state them.
        Raises ValueError for settings that a draft cannot have."""
        _warn_of_targets_layers(config)
        defaults = {key.name: key.default for key in fields(cls) if key.default is not MISSING}
        defaults |= {
            "target_hidden_size": config.hidden_size,
            "draft_vocab_size": config.vocab_size,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "num_key_value_heads": config.num_attention_heads,
        }
        for name, default in defaults.items():
            if getattr(config, name, None) is None:
                setattr(config, name, default)
        depths = trained_depths(config)
        if depths is not None and (type(depths) is not int or depths < 1):
            raise ValueError(f"{depths_key(config)}: must be a positive int, got {depths!r}")
        kind = rope_parameters(config)["rope_type"]
        if kind not in STATIC_ROPE_TYPES:
            raise ValueError(
                f"rope_parameters: rope_type {kind!r} depends on the sequence's length; "
                f"use one of {', '.join(STATIC_ROPE_TYPES)}"
            )
        values: dict[str, Any] = {key.name: getattr(config, key.name) for key in fields(cls)}
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        read = cls(**values)
        read.check()
        return read

    def check(self) -> None:
        """Raise ValueError for settings that a draft cannot have."""
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size: must be in 1..{self.vocab_size}, got {self.draft_vocab_size}"
            )
        mask_id = self.mask_token_id
        if mask_id is not None and not 0 <= mask_id < self.vocab_size:
            raise ValueError(f"mask_token_id: must be in 0..{self.vocab_size - 1}, got {mask_id}")
        for name in ("num_hidden_layers", "num_aux_hidden_states"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"{name}: must be positive, got {value}")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(
                f"num_attention_heads: {heads} is not a multiple of num_key_value_heads {groups}"
            )
        if heads * self.head_dim > _MAX_CHANNELS:
            raise ValueError(f"head_dim: {heads} heads of {self.head_dim} are too many")
        if self.hidden_act != "silu":
            raise ValueError(
                f"hidden_act: engines load drafts with 'silu' alone, got {self.hidden_act!r}; a "
                "draft's activation need not be its target's"
            )
        for name in ("attention_bias", "mlp_bias"):
            if self.qk_norm and vars(self)[name]:
                raise ValueError(
                    f"{name}: no engine loads a draft with it and qk_norm; leave one out"
                )

    @property
    def fc_inputs(self) -> int:
        """The width of the target's states side by side."""
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def all_tokens(self) -> bool:
        """Whether the draft has the target's whole vocabulary."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def mask_id(self) -> int:
        """The token id of the placeholder, for drafts that cannot work without one."""
        if self.mask_token_id is None:
            raise ValueError("mask_token_id: the draft's config has none")
        return self.mask_token_id


def check_config_fits(
    config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], *, where: str
) -> None:
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
