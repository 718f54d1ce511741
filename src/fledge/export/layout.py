"""A draft of ours in an engine's format: facts, features, tensors and config.json.

Applies the tables of `formats.py` to one draft; writes no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.draft.rotary import rope_parameters
from fledge.export.engines import SPECULATORS_PEAGLE_LIMITS, ServingEngine
from fledge.export.formats import TRAINED, expected_tensors, set_path
from fledge.export.rules import Feature, Format
from fledge.methods.registry import method_of

_YARN_ATTENTION = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class TargetFacts:
    """What an export records about its target."""

    name: str = ""  # as the user names it
    served_as: str = ""  # as an engine is given it
    dtype: str = ""  # in which it ran in the self-check, else as stored; "": unknown
    architectures: list[str] = field(default_factory=list)
    layers: int | None = None  # None: unknown
    tokenizer_fingerprint: str | None = None


@dataclass(frozen=True)
class PlainDraft:
    """A draft's tensors and config, with the aux states in layer order."""

    config: Any
    tensors: dict[str, Tensor]

    @property
    def aux_layer_ids(self) -> list[int]:
        return list(self.config.aux_layer_ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype

    def to(self, dtype: torch.dtype) -> "PlainDraft":
        cast = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors.items()
        }
        return PlainDraft(self.config, cast)


def in_layer_order(config: Any, tensors: Mapping[str, Tensor]) -> PlainDraft:
    """The same draft with its aux layers ascending: engines pass the states in that order.

    What reads the concatenated states is permuted with them: the columns of fc, the mask state of
    P-EAGLE, and the norms of the chunks.
    """
    ids: Sequence[int] = config.aux_layer_ids
    order = sorted(range(len(ids)), key=lambda i: ids[i])
    state = dict(tensors)
    if order != list(range(len(ids))):
        width = config.target_hidden_size
        columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in order])
        for name in {"fc.weight", "mask_hidden"} & state.keys():
            state[name] = state[name][..., columns].contiguous()
        if config.fc_norm:
            norms = [state[f"fc_norm.{i}.weight"] for i in order]
            state |= {f"fc_norm.{place}.weight": norm for place, norm in enumerate(norms)}
        config = type(config)(**{**config.to_dict(), "aux_layer_ids": [ids[i] for i in order]})
    return PlainDraft(config, state)


def draft_features(
    draft: PlainDraft, target: TargetFacts, *, trained_embeddings: bool
) -> frozenset[Feature]:
    """What an engine must be able to do to serve this draft."""
    config, rope = draft.config, rope_parameters(draft.config)
    ids, layers = draft.aux_layer_ids, target.layers
    # the default of vLLM and SGLang, as outputs of layers in our numbering
    default = None if layers is None else [1, layers // 2 - 1, layers - 4]
    present: dict[Feature, bool] = {
        "parallel drafting": config.parallel_drafting,
        "several layers": config.num_hidden_layers > 1,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "small vocabulary": config.draft_vocab_size < config.vocab_size,
        "trained embeddings": trained_embeddings,
        "chosen aux layers": ids not in (default, [layers]),
        "last layer": layers is not None and layers - 1 in ids,
        "other width": config.target_hidden_size != config.hidden_size,
        "scaled rotary": rope["rope_type"] != "default",
        "partial rotary": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "yarn attention factor": any(rope.get(name) is not None for name in _YARN_ATTENTION),
        "fc bias": "fc.bias" in draft.tensors,
        "attention bias": config.attention_bias,
        "mlp bias": config.mlp_bias,
        "q/k norms": config.qk_norm,
        **method_of(config).export_features(config),
    }
    return frozenset(name for name, enabled in present.items() if enabled)


def check_representable(
    engine: ServingEngine, layout: Format, version: str, features: frozenset[Feature]
) -> None:
    """Refuse a draft that the engine would misread, and name what would work."""
    refused = engine.refusals(features, version)
    if layout.name == "speculators-peagle":
        refused += [limit for limit in SPECULATORS_PEAGLE_LIMITS if limit.feature in features]
    if refused:
        first = refused[0]
        since = "" if first.since is None else f" (since {first.since})"
        raise BadInput(
            f"{engine.title} {version} cannot serve a draft with {first.feature}{since}",
            where=f"--engine {engine.name}",
            fix=first.instead,
        )


def draft_facts(draft: PlainDraft, target: TargetFacts, *, num_draft_tokens: int) -> dict[str, Any]:
    """Every value that a `KeyRule` may refer to, by name."""
    config = draft.config
    rope = rope_parameters(config)
    if rope["rope_type"] in ("yarn", "llama3"):  # transformers falls back to this, engines do not
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
        "vocab_size", "draft_vocab_size", "initializer_range", "target_hidden_size",
        "num_aux_hidden_states", "fc_norm", "norm_output", "parallel_drafting", "mask_token_id",
        "bos_token_id", "eos_token_id", "pad_token_id", "attention_bias", "mlp_bias", "qk_norm",
    )  # fmt: skip
    return {
        **{name: getattr(config, name) for name in names},
        **{name: getattr(config, name, None) for name in TRAINED},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope,
        "torch_dtype": str(draft.dtype).removeprefix("torch."),
        "aux_layer_ids": draft.aux_layer_ids,
        "eagle_version": getattr(config, "eagle_version", None),
        "num_draft_tokens": num_draft_tokens,
        "target": target.served_as,
        "target_architectures": target.architectures,
        **method_of(config).export_facts(config, target.layers),
    }


def config_values(
    layout: Format, facts: Mapping[str, Any], features: frozenset[Feature]
) -> dict[str, Any]:
    """The contents of config.json by the format's table."""
    values: dict[str, Any] = {}
    for key in layout.keys:
        value = facts[key.fact] if key.fact else key.value
        if key.need == "forbidden" or (key.feature and key.feature not in features):
            continue
        if value is None and key.need == "optional":
            continue
        set_path(values, key.theirs, value)
    if layout.aux_ids_key and (layout.always_aux_ids or "chosen aux layers" in features):
        ids = [layer + layout.aux_id_offset for layer in facts["aux_layer_ids"]]
        set_path(values, layout.aux_ids_key, ids)
    return values


def file_tensors(
    layout: Format, draft: PlainDraft, facts: Mapping[str, Any], features: frozenset[Feature]
) -> dict[str, Tensor]:
    """The tensors under their names in the file.

    The draft was checked for completeness when it was read. The assertion checks our tables: every
    tensor must have a rule, with its shape.
    """
    expected = {rule.ours: rule for rule in expected_tensors(layout, facts, features)}
    tensors = dict(draft.tensors)
    for name, rule in expected.items():
        if rule.zeros and name not in tensors:
            tensors[name] = torch.zeros(rule.shape, dtype=draft.dtype)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {name: rule.shape for name, rule in expected.items()} == shapes, layout.name
    return {
        rule.theirs: tensors[name].detach().contiguous()
        for name, rule in expected.items()
        if rule.need in ("required", "optional")
    }
