"""Which tensors a draft must have, and of which shape, read off the tensors themselves.

A config may be wrong, and so may a tensor. So all tensors that show a size (and the target) vote on
it, and the odd one out is reported.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fledge.diagnosis.checks.base import Subject

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_PROJECTIONS = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)  # fmt: skip


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
        for size, value in _shown(name, tuple(tensor.shape)):
            votes.setdefault(size, Counter())[value] += 1
    aux = subject.view.get("num_aux_hidden_states", 3)
    aux = aux if type(aux) is int and 0 < aux <= 16 else 3
    target_hidden = votes.setdefault("target_hidden", Counter())
    target_hidden[int(subject.target.text.hidden_size)] += 1
    for wide, count in votes.get("aux_hidden", Counter()).items():
        if wide % aux == 0:
            target_hidden[wide // aux] += count
    agreed = {size: counter.most_common(1)[0][0] for size, counter in votes.items()}
    return Sizes(
        hidden=agreed.get("hidden"),
        target_hidden=agreed.get("target_hidden"),
        intermediate=agreed.get("intermediate"),
        queries=agreed.get("queries"),
        keys=agreed.get("keys"),
        draft_vocab=agreed.get("draft_vocab"),
        aux=aux,
    )


def _shown(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """The sizes that a tensor of this name shows."""
    part = name.split(".", 2)[2] if name.startswith("layers.") and name.count(".") > 1 else name
    axes: dict[str, tuple[str, ...]] = {
        "norm.weight": ("hidden",),
        "hidden_norm.weight": ("hidden",),
        **dict.fromkeys(_NORMS, ("hidden",)),
        "fc.weight": ("hidden", "aux_hidden"),
        "self_attn.q_proj.weight": ("queries", ""),
        "self_attn.k_proj.weight": ("keys", ""),
        "self_attn.v_proj.weight": ("keys", ""),
        "self_attn.o_proj.weight": ("hidden", "queries"),
        "mlp.gate_proj.weight": ("intermediate", "hidden"),
        "mlp.up_proj.weight": ("intermediate", "hidden"),
        "mlp.down_proj.weight": ("hidden", "intermediate"),
        "lm_head.weight": ("draft_vocab", "hidden"),
        "embed_tokens.weight": ("", "hidden"),
        "d2t": ("draft_vocab",),
        "fc_norm.0.weight": ("target_hidden",),
    }
    names = axes.get(part, ())
    if len(names) == len(shape):
        yield from ((size, value) for size, value in zip(names, shape, strict=True) if size)


def required_names(subject: Subject, layers: int) -> list[str]:
    """What every EAGLE-3 draft of so many layers has; a head and maps are looked at elsewhere."""
    names = ["fc.weight", "norm.weight", "layers.0.hidden_norm.weight"]
    for layer in range(layers):
        names += [f"layers.{layer}.{part}" for part in (*_NORMS, *_PROJECTIONS)]
    return names


def expected_shapes(subject: Subject, sizes: Sizes) -> dict[str, tuple[int | None, ...]]:
    """The shape of every tensor that may be there; None stands for a size that nobody shows, or
    that another check compares (the target's vocabulary: `vocab-size`)."""
    e, d, i = sizes.hidden, sizes.target_hidden, sizes.intermediate
    q, g = sizes.queries, sizes.keys
    wide = None if d is None else sizes.aux * d
    shapes: dict[str, tuple[int | None, ...]] = {
        "embed_tokens.weight": (None, e),
        "fc.weight": (e, wide),
        "norm.weight": (e,),
        "lm_head.weight": (sizes.draft_vocab, e),
        "d2t": (sizes.draft_vocab,),
        "t2d": (None,),
        "layers.0.hidden_norm.weight": (e,),
        "input_norm.weight": (wide,),
        **{f"fc_norm.{chunk}.weight": (d,) for chunk in range(sizes.aux)},
    }
    for layer in subject.view.layer_numbers:
        inputs = None if e is None else (2 * e if layer == 0 else e)
        own: list[tuple[int | None, ...]] = [
            (e,), (e,), (q, inputs), (g, inputs), (g, inputs), (e, q), (i, e), (i, e), (e, i),
        ]  # fmt: skip
        named = [f"layers.{layer}.{part}" for part in (*_NORMS, *_PROJECTIONS)]
        shapes |= dict(zip(named, own, strict=True))
    return shapes


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )
