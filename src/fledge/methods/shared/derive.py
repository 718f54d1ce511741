"""What a draft's config takes from its target: sizes, rotary positions, a token id as placeholder.

Positions that the draft cannot represent are refused here, with the reason: a draft trained with
positions other than those in serving looks healthy in training, but none of its tokens is accepted.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from fledge.core.errors import BadInput
from fledge.methods.base import stated
from fledge.methods.shared.config import DraftConfig
from fledge.methods.shared.rotary import STATIC_ROPE_TYPES, Rotary, rope_parameters

# Rotary settings that a Llama-style draft takes over unchanged.
_ROPE_KEYS = {
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip

# The layer type whose rotary settings a draft takes if they differ between types: the global
# layers, because the draft attends to everything too. Gemma 4's global layers rotate a quarter of
# wider heads in a way that no engine supports in drafts, so there it is the local layers. Other
# architectures need no entry: their config is unambiguous.
ROPE_LAYERS = {
    "Gemma3ForCausalLM": "full_attention",
    "Gemma3ForConditionalGeneration": "full_attention",
    "Gemma4ForCausalLM": "sliding_attention",
    "Gemma4ForConditionalGeneration": "sliding_attention",
}


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
    rope = _draft_rope(text, rope_layers, name)
    layer = _layer_config(text, rope_layers)
    _check_fields(text, name)
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size
        or _get(layer, "intermediate_size", 4 * text.hidden_size),
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=_get(layer, "num_key_value_heads", layer.num_attention_heads),
        head_dim=_get(layer, "head_dim", text.hidden_size // layer.num_attention_heads),
        rms_norm_eps=_get(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope,
        bos_token_id=_get(text, "bos_token_id", None),
        eos_token_id=_get(text, "eos_token_id", None),
        pad_token_id=_get(text, "pad_token_id", None),
        tie_word_embeddings=False,
        draft_vocab_size=draft_vocab_size or text.vocab_size,
        target_hidden_size=text.hidden_size,
        fc_norm=fc_norm,
        norm_output=norm_output,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        **settings,
    )
    DraftConfig.of(config)
    return config


def _layer_config(text: Any, kind: str | None) -> Any:
    """The config of a layer of this kind, if kinds differ in more than rotary (Gemma 4)."""
    layers, kinds = stated(text, "per_layer_config"), stated(text, "layer_types")
    if not layers or kind is None or kinds is None or kind not in kinds:
        return text
    return layers[list(kinds).index(kind)]


def _check_fields(text: Any, name: str) -> None:
    needed = ["vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"]
    missing = [field for field in needed if stated(text, field) is None]
    if missing:
        raise BadInput(
            f"no draft can be derived: its config lacks {', '.join(missing)}",
            where=name,
            fix="give the draft's config by hand",
        )


def _get(config: PretrainedConfig, name: str, default: Any) -> Any:
    """An attribute of a config; `default` if it is missing or None."""
    value = stated(config, name)
    return default if value is None else value


def _draft_rope(text: Any, rope_layers: str | None, name: str) -> dict[str, Any]:
    """The target's rotary settings, if a Llama-style draft can rotate positions the same way."""

    def refuse(why: str) -> BadInput:
        return BadInput(f"no draft can be derived: {why}", where=name, fix="use another target")

    if stated(text, "alibi"):
        raise refuse("its positions are ALiBi, not rotary")
    parameters = stated(text, "rope_parameters") or stated(text, "rope_scaling")
    if not parameters and stated(text, "rope_theta") is None:
        raise refuse("it has no rotary positions (absolute or learned ones)")
    local_theta = stated(text, "rope_local_base_freq")  # transformers 4's Gemma-3
    if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
        rope = dict(_layer_type_rope(parameters, rope_layers, refuse))
    elif local_theta is not None and rope_layers is None:
        raise refuse("its layers rotate differently and the registry does not say whose to take")
    else:
        rope = rope_parameters(text)
    if "rope_type" not in rope:
        rope["rope_type"] = rope.pop("type", "default")
    kind = rope["rope_type"]
    if rope.get("mrope_section") is not None or kind == "mrope":
        raise refuse("it has multi-axis rotary positions (MRoPE)")
    if kind not in STATIC_ROPE_TYPES:
        raise refuse(
            f"its rotary scaling {kind!r} depends on the sequence's length, or has no Llama form"
        )
    rope = {key: value for key, value in rope.items() if value is not None}
    if unknown := sorted(set(rope) - _ROPE_KEYS - {"type"}):
        raise refuse(f"unknown rotary settings {', '.join(unknown)}")
    rope.pop("type", None)
    return rope


def _layer_type_rope(parameters: Mapping[str, Any], rope_layers: str | None, refuse: Any) -> Any:
    """The settings of one layer type, from settings by layer type."""
    if rope_layers is not None and rope_layers in parameters:
        return parameters[rope_layers]
    first, *others = parameters.values()
    if any(other != first for other in others):
        raise refuse(
            f"its layers rotate differently ({', '.join(parameters)}) "
            "and the registry does not say whose to take"
        )
    return first


# --- verification ------------------------------------------------------------------------------


def verify_rotary(
    draft_config: PretrainedConfig, target: nn.Module, *, max_position: int | None = None
) -> float:
    """Compare the draft's cos and sin with those of the target's rotary module; returns the largest
    difference.

    Positions run from 0 to the target's maximum (or `max_position`). The tolerance grows with the
    angle, because fp32 angles are rounded: at angle a, by about a * 2**-24.
    """
    name, rotary = _rotary_module(target)
    last = (max_position or draft_config.max_position_embeddings) - 1
    steps = torch.linspace(0, last, 257).round().long()
    position_T = torch.unique(torch.cat([torch.arange(min(last + 1, 64)), steps]))
    draft = Rotary(draft_config)
    cos_sin = _target_cos_sin(rotary, position_T, ROPE_LAYERS.get(type(target).__name__))
    angle = position_T[:, None].double() * torch.cat([draft.inv_freq, draft.inv_freq]).double()
    allowed = 1e-5 + angle * 2**-22
    gap = 0.0
    for draft_x, target_x in zip(draft(position_T, torch.float32), cos_sin, strict=True):
        difference = _difference(draft_x.double(), target_x.double())
        if difference is None or bool((difference > allowed).any()):
            raise BadInput(
                f"the draft's rotary positions differ from the target's {name} "
                f"(up to position {last})",
                where=type(target).__name__,
                fix="the draft's config cannot represent this target's positions",
            )
        gap = max(gap, float(difference.max()))
    return gap


def _difference(draft_x: Tensor, target_x: Tensor) -> Tensor | None:
    """The absolute difference per angle; None if the shapes differ. Some targets interleave the two
    copies of an angle instead of storing them in halves."""
    half = draft_x.shape[-1] // 2
    if target_x.shape[-1] == half:  # one copy only (gpt-oss)
        target_x = torch.cat([target_x, target_x], dim=-1)
    if target_x.shape != draft_x.shape:
        return None
    interleaved = torch.cat([target_x[:, ::2], target_x[:, 1::2]], dim=-1)
    halves, pairs = (draft_x - target_x).abs(), (draft_x - interleaved).abs()
    return halves if halves.max() <= pairs.max() else pairs


def _rotary_module(target: nn.Module) -> tuple[str, nn.Module]:
    """The language model's rotary module (vision towers have their own)."""
    for name, module in target.named_modules():
        parts = name.split(".")
        if parts[-1] == "rotary_emb" and not any("vis" in part for part in parts):
            return name, module
    raise BadInput(
        "no rotary module (rotary_emb) in the target",
        where=type(target).__name__,
        fix="its positions cannot be checked, so no draft is derived from it",
    )


@torch.no_grad()
def _target_cos_sin(
    rotary: nn.Module, position_T: Tensor, rope_layers: str | None
) -> tuple[Tensor, Tensor]:
    buffer = next(rotary.buffers())
    x = torch.zeros(1, dtype=torch.float32, device=buffer.device)
    args: tuple[Any, ...] = (x, position_T[None].to(buffer.device))
    kinds = getattr(rotary, "rope_type", None)
    if isinstance(kinds, dict):  # one set of frequencies per layer type
        args += (rope_layers or next(iter(kinds)),)
    cos, sin = rotary(*args)
    return cos[0].cpu(), sin[0].cpu()


# --- the placeholder's token id -------------------------------------------------------------------
# The tokenizer must never emit it: otherwise the draft would take a real token for a placeholder.
# Candidates, in this order: ids without a token (padded embedding rows), reserved names, unused
# special tokens, bytes that no UTF-8 text contains. An explicit id must obey the same rule.

_RESERVED = re.compile(
    r"[<\[].*(reserved|unused|extra_|place.?holder|dummy|special_\d|control_\d).*[>\]]",
    re.IGNORECASE,
)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token")
# Byte-level vocabularies write these bytes as Latin-1 characters, byte-fallback ones as <0xF5>.
_IMPOSSIBLE_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))


def choose_mask_token_id(tokenizer: Any, vocab_size: int, *, seen_ids: Collection[int] = ()) -> int:
    """The lowest id of the best kind of candidate. `vocab_size` is the number of rows of the
    target's embedding table; `seen_ids` occur in the data and are never chosen."""
    emitted = _Emitted(tokenizer, vocab_size, seen_ids)
    for token_id in emitted.candidates():
        if emitted.because(token_id) is None:
            return token_id
    raise BadInput(
        "the tokenizer has no token that it never emits",
        where="mask_token_id",
        fix="add a reserved token to the tokenizer",
    )


def check_mask_token_id(
    mask_token_id: int, tokenizer: Any, vocab_size: int, *, seen_ids: Collection[int] = ()
) -> int:
    """Returns the id; raises BadInput if it can also occur as a real token."""
    reason = _Emitted(tokenizer, vocab_size, seen_ids).because(mask_token_id)
    if reason is not None:
        raise BadInput(
            f"{mask_token_id} cannot be the mask token: {reason}",
            where="mask_token_id",
            fix="leave it out, and one that the tokenizer never emits is chosen",
        )
    return mask_token_id


def placeholder(asked: int | None, tokenizer: Any, vocab_size: int) -> dict[str, int]:
    """The entry of a draft's config for its placeholder: the id that a recipe asks for or, if it
    asks for none, one that the tokenizer never emits."""
    if asked is None:
        return {"mask_token_id": choose_mask_token_id(tokenizer, vocab_size)}
    return {"mask_token_id": check_mask_token_id(asked, tokenizer, vocab_size)}


def last_token_as_placeholder(vocab_size: int) -> dict[str, int]:
    """The same for random weights, where there is no tokenizer."""
    return {"mask_token_id": vocab_size - 1}


@dataclass
class _Emitted:
    """Which ids a tokenizer may emit, and why."""

    tokenizer: Any
    vocab_size: int
    seen_ids: Collection[int]

    def __post_init__(self) -> None:
        vocabulary = self.tokenizer.get_vocab()
        self.token_of: dict[int, str] = {token_id: token for token, token_id in vocabulary.items()}
        self.role_of = {getattr(self.tokenizer, role, None): role for role in _ROLES}
        template = self.tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else [template]
        self.template = " ".join(texts)
        added = self.tokenizer.added_tokens_decoder
        self.special = set(self.tokenizer.all_special_ids)
        self.special |= {token_id for token_id, token in added.items() if token.special}
        self.impossible = set(self._impossible(vocabulary))

    def candidates(self) -> Iterator[int]:
        """Ids that may be suitable, best kind first."""
        yield from (i for i in range(self.vocab_size) if i not in self.token_of)
        yield from (i for i, token in sorted(self.token_of.items()) if _RESERVED.fullmatch(token))
        yield from sorted(self.special)
        yield from sorted(self.impossible)

    def because(self, token_id: int) -> str | None:
        """Why the tokenizer may emit this id; None if it never does."""
        token = self.token_of.get(token_id)
        if not 0 <= token_id < self.vocab_size:
            return f"the target has ids 0..{self.vocab_size - 1}"
        if token_id in self.seen_ids:
            return "it occurs in the data"
        if token is None:
            return None
        if token in self.role_of:
            return f"{token!r} is the tokenizer's {self.role_of[token]}"
        if token in self.template:
            return f"the chat template writes {token!r}"
        if token_id in self.special or _RESERVED.fullmatch(token):
            return None  # it occurs only in a text that spells it out
        return None if token_id in self.impossible else f"{token!r} is an ordinary token"

    def _impossible(self, vocabulary: dict[str, int]) -> Iterator[int]:
        for byte in _IMPOSSIBLE_BYTES:
            if (fallback := vocabulary.get(f"<0x{byte:02X}>")) is not None:
                yield fallback
            letter = vocabulary.get(chr(byte))
            # in a vocabulary of characters this is the letter itself, which the tokenizer emits
            if letter is not None and letter not in self.tokenizer.encode(
                chr(byte), add_special_tokens=False
            ):
                yield letter
