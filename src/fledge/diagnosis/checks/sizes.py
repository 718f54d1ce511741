"""Which tensors a draft must have, and in which shapes, inferred from the tensors themselves.

The config may be wrong, and so may a tensor. So all tensors that show a size (and the target) vote
on it, and the outlier is reported.
"""

import re
from collections import Counter
from dataclasses import dataclass

from fledge.diagnosis.checks.base import Subject
from fledge.diagnosis.foreign import LAYER_EXTRAS

# The size that each axis shows; "": a size that another check compares (`vocab-size`).
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
_EAGLE1_AXES: dict[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("", "hidden"),
    "fc.weight": ("hidden", "merged"),
    "fc.bias": ("hidden",),
    "lm_head.weight": ("", "hidden"),
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
# For the tensors of `LAYER_EXTRAS`: a bias is as long as its matrix has rows.
_EXTRA_AXES: dict[str, tuple[str, ...]] = {
    "self_attn.q_norm.weight": ("channels",),
    "self_attn.k_norm.weight": ("channels",),
    **{
        name.replace(".weight", ".bias"): axes[:1]
        for name, axes in _LAYER_AXES.items()
        if len(axes) == 2
    },
}
_FIRST_NORM = "layers.0.input_layernorm.weight"  # not in EAGLE-1, which does not norm fc's output


_VOTED = ("hidden", "target_hidden", "intermediate", "queries", "keys", "draft_vocab")


@dataclass(frozen=True)
class Sizes:
    """The sizes that most tensors agree on; None if no tensor shows a size."""

    hidden: int | None
    target_hidden: int | None
    intermediate: int | None
    queries: int | None  # heads * channels
    keys: int | None
    draft_vocab: int | None
    aux: int


def sizes_of(subject: Subject) -> Sizes:
    votes: dict[str, Counter[int]] = {}
    top_level = _axes(subject)
    for name, tensor in subject.view.state.items():
        axes = top_level.get(name) or _LAYER_AXES.get(re.sub(r"^layers\.[^.]*\.", "", name), ())
        if len(axes) == tensor.ndim:
            for size, value in zip(axes, tensor.shape, strict=True):
                votes.setdefault(size, Counter())[value] += 1
    default_aux = subject.view.method.aux_layers()
    aux = subject.view.get("num_aux_hidden_states", default_aux)
    aux = aux if aux <= 16 else default_aux
    target_hidden = votes.setdefault("target_hidden", Counter())
    target_hidden[int(subject.target.text.hidden_size)] += 1
    for aux_width, count in votes.get("aux_hidden", Counter()).items():
        if aux_width % aux == 0:
            target_hidden[aux_width // aux] += count
    agreed = {size: votes[size].most_common(1)[0][0] for size in votes}
    return Sizes(aux=aux, **{name: agreed.get(name) for name in _VOTED})


def _layer_axes(subject: Subject) -> dict[str, tuple[str, ...]]:
    """The axes of every tensor in a layer of this draft."""
    flags = {flag for flag, present in subject.view.layer_extras.items() if present}
    extra_names = {name for flag in flags for name in LAYER_EXTRAS[flag]}
    return _LAYER_AXES | {name: axes for name, axes in _EXTRA_AXES.items() if name in extra_names}


def _axes(subject: Subject) -> dict[str, tuple[str, ...]]:
    return _EAGLE1_AXES if subject.view.merges else _AXES


def required_names(subject: Subject) -> list[str]:
    """Tensors that every draft of this kind and depth has; other checks cover the head and the
    maps."""
    layers = range(max(subject.view.layer_numbers, default=0) + 1)
    names = [f"layers.{layer}.{part}" for layer in layers for part in _layer_axes(subject)]
    if subject.view.merges:
        return ["fc.weight", *(name for name in names if name != _FIRST_NORM)]
    return ["fc.weight", "norm.weight", "layers.0.hidden_norm.weight", *names]


def expected_shapes(subject: Subject, sizes: Sizes) -> dict[str, tuple[int | None, ...]]:
    """The shape of every tensor that may be present; None is a size that no tensor shows, or that
    another check compares."""
    hidden, aux_width = sizes.hidden, sizes.target_hidden and sizes.aux * sizes.target_hidden
    merges, double_width = subject.view.merges, hidden and 2 * hidden
    values = {**vars(sizes), "aux_hidden": aux_width, "merged": double_width}
    shapes = {name: tuple(map(values.get, axes)) for name, axes in _axes(subject).items()}
    for layer in subject.view.layer_numbers:
        values["inputs"] = double_width if layer == 0 and not merges else hidden
        for part, axes in _layer_axes(subject).items():
            shapes[f"layers.{layer}.{part}"] = tuple(map(values.get, axes))
    if merges:
        shapes.pop(_FIRST_NORM, None)
    else:
        shapes["input_norm.weight"] = (aux_width,)
        shapes |= {f"fc_norm.{chunk}.weight": (sizes.target_hidden,) for chunk in range(sizes.aux)}
    return shapes


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )
