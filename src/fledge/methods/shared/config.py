"""A draft's config: what it takes from the target's, and the typed form that a draft computes with.

Users and files see a transformers config, `draft.config`. When a draft is built, `DraftConfig.of`
reads and checks it once; each family of drafts with more keys has a subclass. A field states the
bounds of its key in config.json and its default, nothing else repeats them.
"""

import logging
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from transformers import LlamaConfig, PretrainedConfig

from fledge.core.errors import BadInput
from fledge.core.reading import Expected, Flag, ListOf, Maybe, Number, Table, Text, Whole
from fledge.methods.base import stated
from fledge.methods.registry import METHODS, method_of
from fledge.methods.shared.rotary import (
    ROPE_LAYERS,
    ROTARY,
    STATIC_ROPE_TYPES,
    draft_rope,
    rope_parameters,
)
from fledge.rollout.slots import check_counts

log = logging.getLogger(__name__)

SIZE = Whole(1, 2**24)
FLAG = Maybe(Flag())
_MAX_CHANNELS = 2**24  # of all heads
_TOKEN = Maybe(Whole(0, 2**24))
# Keys that a draft's size or computation depends on, and that no field of a typed config holds.
_OTHER_KEYS: dict[str, Expected] = {
    "max_position_embeddings": Whole(1),
    "aux_layer_ids": Maybe(ListOf(Whole(0, 2**16), most=2**10)),
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "rope_theta": Maybe(Number(1e-30, 1e30)),
    "partial_rotary_factor": Maybe(Number(1e-6, 1)),
    "rope_parameters": Maybe(ROTARY),
    "rope_scaling": Maybe(ROTARY),
    "tie_word_embeddings": FLAG,
}
# How many tokens a draft was trained to propose, each in the configs of some methods.
_DEPTHS_KEYS = ("ttt_steps", "num_depths", "draft_tokens")
# Of EAGLE-3's own computation: no other family has them.
EAGLE3_FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "parallel_drafting")
WITHOUT_NORMS = {"fc_norm": False, "norm_output": False}  # `fixed_draft` of other families
PLACEHOLDER_KEY = "mask_token_id"


def key(bounds: Expected, default: Any = MISSING) -> Any:
    """A field of a typed config: what config.json may say, and what a missing key means."""
    return field(default=default, metadata={"bounds": bounds})


def config_keys() -> dict[str, Expected]:
    """What config.json may say about the keys of any family of drafts."""
    families = (method.draft_type().config_type for method in METHODS.values())
    return {name: kind for family in families for name, kind in family.file_keys().optional.items()}


def depths_key(config: PretrainedConfig) -> str:
    """The key for the number of tokens that a draft was trained to propose."""
    return method_of(config).depths_key


def trained_depths(config: PretrainedConfig) -> int | None:
    """How many tokens a draft was trained to propose; None for older configs."""
    depths: int | None = stated(config, depths_key(config))
    return depths


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What a draft of any family computes with, whatever becomes of `draft.config` later."""

    vocab_size: int = key(SIZE)
    hidden_size: int = key(SIZE)
    intermediate_size: int = key(SIZE)
    num_hidden_layers: int = key(Whole(1, 2**10))
    num_attention_heads: int = key(SIZE)
    hidden_act: str = key(Text(64))
    rms_norm_eps: float = key(Number(0, 1))
    initializer_range: float = key(Number(0, 1e3))
    # keys beyond those of transformers' Llama config, with their defaults
    num_aux_hidden_states: int = key(Maybe(Whole(1, 2**10)), 3)
    fc_norm: bool = key(FLAG, default=False)
    norm_output: bool = key(FLAG, default=False)
    norm_before_residual: bool = key(FLAG, default=False)
    parallel_drafting: bool = key(FLAG, default=False)
    mask_token_id: int | None = key(_TOKEN, None)
    attention_bias: bool = key(FLAG, default=False)
    mlp_bias: bool = key(FLAG, default=False)
    qk_norm: bool = key(FLAG, default=False)
    # by default those of the other keys: see `of`
    target_hidden_size: int = key(Maybe(SIZE))
    draft_vocab_size: int = key(Maybe(SIZE))
    head_dim: int = key(Maybe(SIZE))
    num_key_value_heads: int = key(Maybe(SIZE))

    @classmethod
    def file_keys(cls) -> Table:
        """What config.json may say: every key that determines a draft's size or computation."""
        own: dict[str, Expected] = {k.name: k.metadata["bounds"] for k in fields(cls)}
        return Table(optional=_OTHER_KEYS | own)

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Read a config. Missing keys are set to their defaults in it, so that files state them.
        Raises ValueError for settings that a draft cannot have."""
        defaults = {k.name: k.default for k in fields(cls) if k.default is not MISSING}
        defaults |= {
            "target_hidden_size": config.hidden_size,
            "draft_vocab_size": config.vocab_size,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "num_key_value_heads": config.num_attention_heads,
        }
        for name, default in defaults.items():
            if stated(config, name) is None:
                setattr(config, name, default)
        for name in _DEPTHS_KEYS:
            if stated(config, name) is not None:
                check_counts(**{name: stated(config, name)})
        kind = rope_parameters(config)["rope_type"]
        if kind not in STATIC_ROPE_TYPES:
            raise ValueError(
                f"rope_parameters: rope_type {kind!r} depends on the sequence's length; "
                f"use one of {', '.join(STATIC_ROPE_TYPES)}"
            )
        values: dict[str, Any] = {k.name: stated(config, k.name) for k in fields(cls)}
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
        if self.has_mask and not 0 <= self.mask_id < self.vocab_size:
            what = f"must be in 0..{self.vocab_size - 1}, got {self.mask_id}"
            raise ValueError(f"{PLACEHOLDER_KEY}: {what}")
        for name in ("num_hidden_layers", "num_aux_hidden_states"):
            check_counts(**{name: vars(self)[name]})
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

    def refuse(self, *names: str, family: str) -> None:
        """Refuse settings that a family of drafts does not have."""
        for name in names:
            if vars(self)[name]:
                raise ValueError(f"{name}: {family} drafts have none")

    @property
    def aux_width(self) -> int:
        """The width of the target's states side by side."""
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def fc_inputs(self) -> int:
        """The width of the input of fc."""
        return self.aux_width

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias

    @property
    def norms_inputs(self) -> bool:
        """Whether the target's states are normed before fc, layer by layer (EAGLE-3.1)."""
        return self.fc_norm

    @property
    def extra_norms(self) -> bool:
        """Whether the draft has a norm of EAGLE-3.1."""
        return self.norms_inputs or self.norm_output

    @property
    def all_tokens(self) -> bool:
        """Whether the draft has the target's whole vocabulary."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def has_mask(self) -> bool:
        """Whether the draft has a placeholder."""
        return self.mask_token_id is not None

    @property
    def mask_id(self) -> int:
        """The token id of the placeholder, for drafts that cannot work without one."""
        if self.mask_token_id is None:
            raise ValueError(f"{PLACEHOLDER_KEY}: the draft's config has none")
        return self.mask_token_id


# --- from the target ------------------------------------------------------------------------------


def derive_draft_config(
    target_config: PretrainedConfig,
    *,
    architecture: str | None = None,
    draft_vocab_size: int | None = None,
    num_hidden_layers: int = 1,
    intermediate_size: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    qk_norm: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    **settings: Any,
) -> LlamaConfig:
    """The config of a draft that fits this target: same width, heads, norm and rotary positions.

    `architecture` is the target's class name, for configs that do not name it (a model in memory).
    `settings` are those of the method (`Method.draft_settings`).
    """
    text = stated(target_config, "text_config") or target_config
    class_name = architecture or (stated(target_config, "architectures") or [None])[0]
    name = class_name or type(target_config).__name__
    rope_layers = ROPE_LAYERS.get(class_name or "")
    rope, layer = draft_rope(text, rope_layers, name), _layer_config(text, rope_layers)
    needed = ["vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"]
    if missing := [field for field in needed if stated(text, field) is None]:
        raise BadInput(
            f"no draft can be derived: its config lacks {', '.join(missing)}",
            where=name,
            fix="give the draft's config by hand",
        )

    def given(config: PretrainedConfig, name: str, default: Any) -> Any:
        value = stated(config, name)
        return default if value is None else value

    size, heads = text.hidden_size, layer.num_attention_heads
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=size,
        intermediate_size=intermediate_size or given(layer, "intermediate_size", 4 * size),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=given(layer, "num_key_value_heads", heads),
        head_dim=given(layer, "head_dim", size // heads),
        rms_norm_eps=given(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope,
        **{name: stated(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        tie_word_embeddings=False,
        draft_vocab_size=draft_vocab_size or text.vocab_size,
        target_hidden_size=size,
        fc_norm=fc_norm,
        norm_output=norm_output,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        **settings,
    )
    DraftConfig.of(config)
    return config


def _layer_config(text: PretrainedConfig, kind: str | None) -> PretrainedConfig:
    """The config of a layer of this kind, if kinds differ in more than rotary (Gemma 4)."""
    layers, kinds = stated(text, "per_layer_config"), stated(text, "layer_types")
    if not layers or kinds is None or kind not in kinds:
        return text
    layer: PretrainedConfig = layers[list(kinds).index(kind)]
    return layer
