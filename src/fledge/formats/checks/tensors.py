"""Checks of the tensors: none missing, none unknown, values that training produces.

Engines skip tensors that they do not know and leave missing ones random, mostly without a warning.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fledge.core.terminal import counted
from fledge.formats.checks.base import Finding, Subject, check, error, note, warning
from fledge.formats.codec import EAGLE1_CLASSES, EAGLE3_CLASS, sorted_chunks
from fledge.formats.foreign import DraftFiles

# --- sizes ---------------------------------------------------------------------------------------
# Which tensors a draft must have, and in which shapes, inferred from the tensors themselves.
#
# The config may be wrong, and so may a tensor. So all tensors that show a size (and the target)
# vote on it, and the outlier is reported.


# Reported by other checks where they are missing, or in no file of some drafts.
_OPTIONAL = re.compile(
    r"(embed_tokens|lm_head|d2t|t2d|fc\.bias|fc_norm|input_norm|confidence_head)\b"
)
_CHUNK_NORM = "fc_norm.{}.weight"
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
    top_level, layer = subject.view.axes, subject.view.layer_axes
    for name, tensor in subject.view.state.items():
        axes = top_level.get(name) or layer.get(re.sub(r"^layers\.[^.]*\.", "", name), ())
        if len(axes) == tensor.ndim:
            for size, value in zip(axes, tensor.shape, strict=True):
                votes.setdefault(size, Counter())[value] += 1
    aux = max(1, min(subject.aux_count, 16))
    target_hidden = votes.setdefault("target_hidden", Counter())
    target_hidden[int(subject.target.text.hidden_size)] += 1
    for aux_width, count in votes.get("aux_hidden", Counter()).items():
        if aux_width % aux == 0:
            target_hidden[aux_width // aux] += count
    agreed = {size: votes[size].most_common(1)[0][0] for size in votes}
    return Sizes(aux=aux, **{name: agreed.get(name) for name in _VOTED})


def expected_shapes(subject: Subject, sizes: Sizes) -> dict[str, tuple[int | None, ...]]:
    """The shape of every tensor that may be present; None is a size that no tensor shows, or that
    another check compares."""
    view, hidden = subject.view, sizes.hidden
    aux_width = sizes.target_hidden and sizes.aux * sizes.target_hidden
    double_width = hidden and 2 * hidden
    values = {**vars(sizes), "aux_hidden": aux_width, "merged": double_width}
    shapes = {name: tuple(map(values.get, axes)) for name, axes in view.axes.items()}
    for chunk in range(1, sizes.aux if _CHUNK_NORM.format(0) in view.axes else 0):
        shapes[_CHUNK_NORM.format(chunk)] = (sizes.target_hidden,)
    for layer in range(max(view.layer_numbers, default=0) + 1):
        values["inputs"] = double_width if layer == 0 and view.fuses else hidden
        for part, axes in view.layer_axes.items():
            shapes[f"layers.{layer}.{part}"] = tuple(map(values.get, axes))
    if view.merges:
        del shapes[_FIRST_NORM]
    return shapes


def fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or have == want for have, want in zip(shape, expected, strict=True)
    )


# --- tensors --------------------------------------------------------------------------------------


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@check("algorithm", "static", "an EAGLE-1 draft declared as EAGLE-3, or the reverse; not a draft",
       repairs=True)  # fmt: skip
def algorithm(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    if not any(name.startswith(("layers.", "fc")) for name in view.state):
        examples = ", ".join(sorted(subject.files.tensors)[:3])
        yield error(f"no tensor of a draft among {len(view.state)} ({examples} ...)", last=True)
        return
    if not view.misnamed:
        return
    if view.merges:
        what = "fc merges one embedding and one hidden state (EAGLE-1/2), declared as EAGLE-3"
    else:
        what = "layer 0 reads embedding and state side by side (EAGLE-3), declared as EAGLE-1"
    complete = not missing_names(subject) and not unknown_names(subject) and not view.layout.nested
    vllm, sglang = (view.method.algorithms[engine] for engine in ("vllm", "sglang"))
    yield error(
        f"{what}: served like that, it accepts nothing",
        fix=f'vLLM: method "{vllm}"; SGLang: --speculative-algorithm {sglang}',
        repair=partial(_declare_kind, merges=view.merges) if complete else None,
        last=not complete,
    )


def _declare_kind(files: DraftFiles, *, merges: bool) -> None:
    """Write the class of the kind of draft that the tensors belong to."""
    files.put("architectures", [EAGLE1_CLASSES["sglang"] if merges else EAGLE3_CLASS])
    if not merges:
        files.put("eagle_version", None)


def missing_names(subject: Subject) -> list[str]:
    """Tensors that this kind of draft requires and the file lacks; other checks cover the head and
    the maps."""
    known, state = expected_shapes(subject, sizes_of(subject)), subject.view.state
    return [name for name in known if name not in state and not _OPTIONAL.match(name)]


def unknown_names(subject: Subject) -> list[str]:
    """Tensors, by their names in the file, that no draft of this kind has."""
    view = subject.view
    expected = {*expected_shapes(subject, sizes_of(subject))}
    expected |= {"mask_hidden"} if view.fuses else set()
    return [view.names[our_name] for our_name in view.state if our_name not in expected]


@check("names", "static", "wrapper prefixes, or one layer under two names", repairs=True)
def names(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    taken = {*view.names.values(), *view.junk}
    if clashes := [name for name in view.tensors if name not in taken]:
        kept = {name: view.names[view.own_name(name)] for name in clashes}
        same = all(torch.equal(view.tensors[a], view.tensors[b]) for a, b in kept.items())
        yield error(
            f"{counted(len(kept), 'tensor is', 'tensors are')} stored twice, such as "
            f"{clashes[0]} and {kept[clashes[0]]}",
            fix="keep one name: midlayer.* or layers.0.*",
            repair=partial(drop_tensors, doomed=clashes) if same else None,
        )
        return
    prefix = view.layout.prefix
    wrapped = [
        name for our_name, name in view.names.items() if name not in _spellings(our_name, prefix)
    ]
    if wrapped:
        yield error(
            f"{counted(len(wrapped), 'name is', 'names are')} not the engines', such as "
            f"{wrapped[0]}",
            fix=f"rename to {view.own_name(wrapped[0])}",
            repair=_unwrap,
        )
    elif prefix:
        count = sum(name.startswith(prefix) for name in subject.files.tensors)
        named = counted(count, "name begins", "names begin")
        evidence = f"{named} with '{prefix}': SGLang takes them, vLLM refuses to load"
        fix = "for vLLM: fledge import, then fledge export --engine vllm"
        yield subject.only_for("vllm", error(evidence, fix, _unwrap))


def _spellings(our_name: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor may have in a file whose backbone has this prefix."""
    if prefix and our_name not in ("lm_head.weight", "d2t", "t2d", "mask_hidden"):
        return (prefix + our_name,)
    return our_name, _midlayer(our_name), our_name.replace("input_layernorm", "hidden_norm")


def _midlayer(our_name: str) -> str:
    return our_name.replace("layers.0.", "midlayer.", 1)


def drop_tensors(files: DraftFiles, doomed: Iterable[str]) -> None:
    for name in doomed:
        files.tensors.pop(name, None)


def sort_aux(files: DraftFiles) -> None:
    """Sort the aux layers in ascending order, and what reads their chunks with them."""
    ids = files.view.aux_layer_ids
    assert ids is not None
    for name, value in sorted_chunks(ids, files.view.state).items():
        files.put_tensor(name, value)
    files.put_aux(sorted(ids))


def _unwrap(files: DraftFiles) -> None:
    """Strip wrappers from all names; layer 0 stays `midlayer` if the file calls it that."""
    files.tensors = {
        _midlayer(our_name) if ".midlayer." in f".{name}" else our_name: files.tensors[name]
        for our_name, name in files.view.names.items()
    }


@check("missing", "static", "tensors that an engine would leave random")
def missing(subject: Subject) -> Iterator[Finding]:
    """Only in layers that are present: `num-hidden-layers` reports absent ones."""
    view, absent = subject.view, missing_names(subject)
    shared = view.merges or view.borrows  # it has no embeddings or head of its own
    if not shared and "lm_head.weight" not in view.state:
        if (subject.draft_vocab_size or subject.vocab_size) < subject.vocab_size:
            absent.append("lm_head.weight")
        else:
            yield note("no lm_head: engines share the target's")
    if not shared and "embed_tokens.weight" not in view.state:
        yield note("no embed_tokens: engines share the target's")
    if absent:
        yield error(
            f"{counted(len(absent), 'tensor is', 'tensors are')} missing: {_first_few(absent)}; "
            "engines silently load the rest and leave these random",
            fix="export again from the trainer's own checkpoint",
        )


@check("unexpected", "static", "tensors that no engine knows", repairs=True)
def unexpected(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    if view.junk:
        yield warning(
            f"{counted(len(view.junk), 'tensor is', 'tensors are')} not part of the draft: "
            f"{_first_few(view.junk)}; vLLM refuses them",
            fix="leave them out",
            repair=partial(drop_tensors, doomed=view.junk),
        )
    if extra := unknown_names(subject):
        yield error(
            f"{counted(len(extra), 'tensor')} that no {view.method.title} draft has: "
            f"{_first_few(extra)}; vLLM refuses them, SGLang skips them",
            fix="is it another kind of draft, or one with biases?",
        )
    if view.merges and (head := view.names.get("lm_head.weight")):
        evidence = f"{head}: an EAGLE-1 draft has no head, SGLang skips it, vLLM refuses the file"
        fix = "leave it out: the target's head reads the draft's states"
        yield subject.only_for("vllm", error(evidence, fix, partial(drop_tensors, doomed=[head])))


@check("shape", "static", "tensors whose shape does not fit the others")
def shape(subject: Subject) -> Iterator[Finding]:
    expected = expected_shapes(subject, sizes_of(subject))
    wrong, unreadable = [], False
    for name, tensor in subject.view.state.items():
        expected_shape = expected.get(name)
        if expected_shape is not None and not fits(tuple(tensor.shape), expected_shape):
            sizes = ", ".join("?" if size is None else str(size) for size in expected_shape)
            wrong.append(f"{name} is {list(tensor.shape)}, expected [{sizes}]")
        axes = len(expected_shape) if expected_shape is not None else tensor.ndim
        unreadable |= tensor.numel() == 0 or tensor.ndim != axes
    if wrong or unreadable:
        evidence = "; ".join(wrong[:4]) or "a tensor without values"
        fix = "export again; was a matrix transposed or cut?"
        yield error(evidence, fix, last=unreadable)


@check("dtype", "static", "mixed, odd or misdeclared number formats", repairs=True)
def dtype(subject: Subject) -> Iterator[Finding]:
    weights = {n: t for n, t in subject.view.state.items() if n not in ("d2t", "t2d")}
    counts = Counter(tensor.dtype for tensor in weights.values())
    odd = sorted(str(kind).removeprefix("torch.") for kind in counts if kind not in _FLOATS)
    if odd:
        fix = "a draft is served in bf16, fp16 or fp32 weights"
        yield error(f"weights in {', '.join(odd)}", fix)
        return
    if len(counts) > 1:
        shares = ", ".join(f"{str(k).removeprefix('torch.')} {n}" for k, n in counts.most_common())
        yield warning(f"weights in several formats: {shares} tensors", fix="export in one format")
        return
    stored = str(next(iter(counts), torch.float32)).removeprefix("torch.")
    for key in ("torch_dtype", "dtype"):
        declared = subject.view.flat.get(key)
        if isinstance(declared, str) and declared.removeprefix("torch.") not in (stored, "auto"):
            yield warning(
                f"{key} is {declared}, the weights are {stored}: an engine would convert them",
                fix=f"{key}: {stored}",
                repair=partial(DraftFiles.put, key=key, value=stored),
            )


@check("not-finite", "static", "NaN or infinite weights")
def not_finite(subject: Subject) -> Iterator[Finding]:
    for name, tensor in _floats(subject):
        if bad := int((~torch.isfinite(tensor)).sum()):
            evidence = f"{name} has {bad:,} NaN or infinite values of {tensor.numel():,}"
            yield error(evidence, fix="take an earlier checkpoint")


@check("constant", "static", "weights that are one value throughout")
def constant(subject: Subject) -> Iterator[Finding]:
    """Norms of ones are not a fault, only hardly trained. A zero fc.bias is how an fc without a
    bias is written for SGLang."""
    for name, tensor in _floats(subject):
        value = float(tensor.flatten()[0])
        default = 0.0 if name == "fc.bias" else 1.0
        harmless = tensor.numel() == 1 or (tensor.ndim == 1 and value == default)
        if math.isfinite(value) and not harmless and bool((tensor == value).all()):
            yield error(f"{name} is {value:g} throughout", fix="it was never loaded or never saved")


@check("random-weights", "static", "matrices that look freshly initialized")
def random_weights(subject: Subject) -> Iterator[Finding]:
    tables = ("embed_tokens.weight", "lm_head.weight")
    fresh = [
        f"{name} (std {std:.4f}, no direction stands out)"
        for name, tensor in _floats(subject)
        if tensor.ndim == 2 and name not in tables
        if (std := fresh_std(tensor, subject)) is not None
    ]
    if fresh:
        yield warning(
            f"{counted(len(fresh), 'matrix looks', 'matrices look')} randomly initialized: "
            f"{_first_few(fresh)}",
            fix="were they trained, or did an exporter recreate them?",
        )


def fresh_std(tensor_NM: Tensor, subject: Subject) -> float | None:
    """The standard deviation of a matrix that looks freshly initialized; None if trained.

    Two tests: the deviation is one that initializers use (0.02, the config's own, or torch's
    uniform 1 / sqrt(3 * inputs)) within 2 %, and the largest eigenvalue of the covariance is within
    the Marchenko-Pastur law for independent numbers. Trained weights do not pass both.
    """
    tall_NM = tensor_NM if len(tensor_NM) >= tensor_NM.shape[1] else tensor_NM.t()
    rows = tall_NM[:4096, :1536].float()  # any block of an i.i.d. matrix is i.i.d. too
    count, width = rows.shape
    std = float(rows.std())
    typical = [0.02, subject.view.get("initializer_range", 0.02), (3 * tensor_NM.shape[1]) ** -0.5]
    if width < 8 or not any(abs(std / value - 1) < 0.02 for value in typical if value):
        return None
    largest = float(torch.linalg.eigvalsh(rows.t() @ rows / count)[-1])
    edge = std**2 * (1 + math.sqrt(width / count)) ** 2
    return std if largest < edge * (1 + 2.5 * width ** (-2 / 3)) else None


def _floats(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in subject.view.state.items():
        if tensor.dtype in _FLOATS and tensor.numel():
            yield name, tensor


def _first_few(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if items[4:] else "")
