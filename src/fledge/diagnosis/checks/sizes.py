"""Which tensors a draft must have, and of which shape, read off the tensors themselves.

A config may be wrong, and so may a tensor. So all tensors that show a size (and the target) vote on
it, and the odd one out is reported.
"""

import re
from collections import Counter
from dataclasses import dataclass

from fledge.diagnosis.checks.base import Subject

# The size that each axis shows; "": one that another check compares (`vocab-size`).
_AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("", "hidden"),
    "fc.weight": ("hidden", "aux_hidden"),
    "fc_norm.0.weight": ("target_hidden",),
    "norm.weight": ("hidden",),
    "lm_head.weight": ("draft_vocab", "hidden"),
    "d2t": ("draft_vocab",),
    "t2d": ("",),
    "layers.0.hidden_norm.weight": ("hidden",),
}
_LAYER_AXES: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("queries", "inputs"),
    "self_attn.k_proj.weight": ("keys", "inputs"),
    "self_attn.v_proj.weight": ("keys", "inputs"),
    "self_attn.o_proj.weight": ("hidden", "queries"),
    "mlp.gate_proj.weight": ("intermediate", "hidden"),
    "mlp.up_proj.weight": ("intermediate", "hidden"),
    "mlp.down_proj.weight": ("hidden", "intermediate"),
}


_VOTED = ("hidden", "target_hidden", "intermediate", "queries", "keys", "draft_vocab")


@dataclass(frozen=True)
class Sizes:
    """What most tensors agree on; None where no tensor shows it."""

    hidden: int | None
    target_hidden: int | None
    intermediate: int | None
    queries: int | None  # heads * channels
    keys: int | None
    draft_vocab: int | None
    aux: int


def sizes_of(subject: Subject) -> Sizes:
    votes: dict[str, Counter[int]] = {}
    for name, tensor in subject.view.state.items():
        axes = _AXES.get(name) or _LAYER_AXES.get(re.sub(r"^layers\.[^.]*\.", "", name), ())
        if len(axes) == tensor.ndim:
            for size, value in zip(axes, tensor.shape, strict=True):
                votes.setdefault(size, Counter())[value] += 1
    aux = subject.view.get("num_aux_hidden_states", 3)
    aux = aux if aux <= 16 else 3
    target_hidden = votes.setdefault("target_hidden", Counter())
    target_hidden[int(subject.target.text.hidden_size)] += 1
    for wide, count in votes.get("aux_hidden", Counter()).items():
        if wide % aux == 0:
            target_hidden[wide // aux] += count
    agreed = {size: votes[size].most_common(1)[0][0] for size in votes}
    return Sizes(aux=aux, **{name: agreed.get(name) for name in _VOTED})


def required_names(layers: int) -> list[str]:
    """What every EAGLE-3 draft of so many layers has; a head and maps are looked at elsewhere."""
    names = ["fc.weight", "norm.weight", "layers.0.hidden_norm.weight"]
    return names + [f"layers.{layer}.{part}" for layer in range(layers) for part in _LAYER_AXES]


def expected_shapes(subject: Subject, sizes: Sizes) -> dict[str, tuple[int | None, ...]]:
    """The shape of every tensor that may be there; None stands for a size that nobody shows, or
    that another check compares."""
    hidden, wide = sizes.hidden, sizes.target_hidden and sizes.aux * sizes.target_hidden
    values = {**vars(sizes), "aux_hidden": wide}
    shapes = {name: tuple(map(values.get, axes)) for name, axes in _AXES.items()}
    shapes["input_norm.weight"] = (wide,)
    shapes |= {f"fc_norm.{chunk}.weight": (sizes.target_hidden,) for chunk in range(sizes.aux)}
    for layer in subject.view.layer_numbers:
        values["inputs"] = hidden and (2 * hidden if layer == 0 else hidden)
        for part, axes in _LAYER_AXES.items():
            shapes[f"layers.{layer}.{part}"] = tuple(map(values.get, axes))
    return shapes


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )
