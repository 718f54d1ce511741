"""A head in the files of its target: reading it from there, and writing a tuned one back."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from fledge.core.errors import BadInput
from fledge.methods.mtp.families import Family, family_of
from fledge.methods.shared.config import derive_draft_config
from fledge.models.weight_files import read_tensors
from fledge.target.layers import text_config

if TYPE_CHECKING:
    from fledge.methods.mtp.draft import MtpDraftModel

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_MULTI_AXIS = (
    "mrope_section",
    "mrope_interleaved",
)  # for text, the positions of all axes are equal


def derive_config(target: PretrainedConfig, **keys: Any) -> LlamaConfig:
    """The config of a head for this target."""
    text = text_config(target)
    family = family_of(text)
    if not family.layers:
        return derive_draft_config(target, **keys, mtp_family=family.name)
    values = text.to_dict()
    plain = type(text)(**values)
    rope = {k: v for k, v in (text.rope_parameters or {}).items() if k not in _MULTI_AXIS}
    plain.rope_parameters = rope
    latent = getattr(text, "qk_nope_head_dim", None)
    channels = text.head_dim if latent is None else latent + text.qk_rope_head_dim
    architecture = (getattr(target, "architectures", None) or [type(target).__name__])[0]
    config = derive_draft_config(plain, **{"architecture": architecture} | keys)
    if latent is not None:  # keys and values of all heads, of which a part is rotated
        config.head_dim, config.num_key_value_heads = channels, config.num_attention_heads
        config.rope_parameters = {
            **rope, "partial_rotary_factor": text.qk_rope_head_dim / channels,
        }  # fmt: skip
    config.mtp_family, config.layer_config = family.name, values
    return config


# --- names ----------------------------------------------------------------------------------------


def prefixes(family: Family, layers: int) -> tuple[str, str]:
    """Of the tensors of a head in the files of a target with so many layers, and of its layer."""
    return family.prefix.format(layers=layers), family.layer_prefix.format(layers=layers)


def own_name(name: str, family: Family, layers: int) -> str | None:
    """Our name of a tensor in a target's files; None if it is not the head's, or a copy of the
    target's embedding or head."""
    head, layer = prefixes(family, layers)
    ours = {theirs: own for own, theirs in family.names.items()}
    if name.startswith(head) and (rest := name.removeprefix(head)) in ours:
        return ours[rest]
    if not name.startswith(layer) or name.endswith(("embed_tokens.weight", "head.weight")):
        return None
    return "layers.0." + name.removeprefix(layer)


def read_head(directory: Path, draft: "MtpDraftModel") -> dict[str, Tensor]:
    """The first head in a target's files, under our names."""
    family, layers = draft.spec.family, depth_of(draft.config)
    head, _ = prefixes(family, layers)
    found = read_tensors(directory, wanted=lambda name: own_name(name, family, layers))
    if not found:
        what, fix = f"no head among the weights (none is named {head}...)", "leave init_from out"
        raise BadInput(what, where=str(directory), fix=fix)
    named = {str(own_name(name, family, layers)): tensor for name, tensor in found.items()}
    state = stacked_experts(in_family_order(named, family))
    want = draft.state_dict()
    if wrong := [name for name in {*want, *state} if _shape(want, name) != _shape(state, name)]:
        what = f"its head is not that of {family.title}: {', '.join(sorted(wrong)[:3])}"
        raise BadInput(what, where=str(directory))
    return state


def depth_of(config: PretrainedConfig) -> int:
    """The number of the target's layers, where a head's tensors are named by it."""
    return int((getattr(config, "layer_config", None) or {}).get("num_hidden_layers", 0))


def _shape(state: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return state[name].shape if name in state else None


def in_family_order(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The tensors with the halves of fc as the family has them, or from there back to ours."""
    if not family.states_first or "fc.weight" not in tensors:
        return dict(tensors)
    first, second = tensors["fc.weight"].chunk(2, dim=1)
    return {**tensors, "fc.weight": torch.cat([second, first], dim=1)}


def stacked_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers computes with them: those of a kind in one tensor, gate beside up."""
    single = {name: match for name in state if (match := _EXPERT.search(name))}
    if not single:
        return state
    before = next(iter(single)).partition("mlp.experts.")[0] + "mlp.experts."
    count = 1 + max(int(match[1]) for match in single.values())

    def stack(*kinds: str) -> Tensor:
        parts = [[state[f"{before}{i}.{k}_proj.weight"] for k in kinds] for i in range(count)]
        return torch.stack([torch.cat(part) for part in parts])

    rest = {name: tensor for name, tensor in state.items() if name not in single}
    return rest | {
        f"{before}gate_up_proj": stack("gate", "up"), f"{before}down_proj": stack("down"),
    }  # fmt: skip


def head_tensors(
    state: Mapping[str, Tensor], names: Iterable[str], family: Family, layers: int
) -> dict[str, Tensor]:
    """Those of a target's tensors that are the head's, by their names there, from our state."""
    ours, tensors = in_family_order(state, family), dict[str, Tensor]()
    for name in names:
        own = own_name(name, family, layers)
        if own is None:
            continue
        if match := _EXPERT.search(own):
            before, index, kind = own[: match.start()] + "mlp.experts.", int(match[1]), match[2]
            whole = ours[f"{before}{'down_proj' if kind == 'down' else 'gate_up_proj'}"][index]
            halves = whole.chunk(2)
            tensors[name] = {"gate": halves[0], "up": halves[-1]}.get(kind, whole)
        else:
            tensors[name] = ours[own]
    return tensors
