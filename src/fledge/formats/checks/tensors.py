"""Checks of the tensors: the right kind, none missing, none unknown, values that training produces.

Engines skip tensors that they do not know and leave missing ones random, mostly without a warning.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fledge.core.terminal import counted
from fledge.formats.checks.base import Finding, Subject, check, error, note, warning, wrong_key
from fledge.formats.codec import (
    EAGLE1_CLASSES,
    EAGLE3_CLASS,
    EAGLE3_QWEN3_CLASS,
    NESTED_KEY,
    SPECULATORS_KEY,
)
from fledge.formats.foreign import DraftFiles

# --- sizes ---------------------------------------------------------------------------------------
# Which tensors a draft must have, and in which shapes, inferred from the tensors themselves.
#
# The config may be wrong, and so may a tensor. So all tensors that show a size (and the target)
# vote on it, and the outlier is reported.


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


def expected_shapes(subject: Subject) -> dict[str, tuple[int | None, ...]]:
    """The shape of every tensor that may be present; None is a size that no tensor shows, or that
    another check compares."""
    view, sizes = subject.view, sizes_of(subject)
    aux_width = sizes.target_hidden and sizes.aux * sizes.target_hidden
    double_width = sizes.hidden and 2 * sizes.hidden
    values = {**vars(sizes), "aux_hidden": aux_width, "merged": double_width}
    values |= {"vocab": subject.vocab_size, "rank": view.setting("markov_rank")}
    axes = dict(view.axes)
    if norm := axes.pop(view.chunk_norm(0), None):
        axes |= {view.chunk_norm(chunk): norm for chunk in range(sizes.aux)}
    shapes = {name: tuple(map(values.get, own_axes)) for name, own_axes in axes.items()}
    for layer in range(max(view.layer_numbers, default=0) + 1):
        values["inputs"] = double_width if layer == 0 and view.fuses else sizes.hidden
        for part, part_axes in view.layer_axes.items():
            shapes[f"layers.{layer}.{part}"] = tuple(map(values.get, part_axes))
    if view.merges:  # which does not norm fc's output
        del shapes["layers.0.input_layernorm.weight"]
    return shapes


# --- checks --------------------------------------------------------------------------------------


# Classes that vLLM or SGLang have, under this name or with the prefix "Eagle3".
_EAGLE3 = (EAGLE3_CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_TRAINERS = {"automodel": ("LlamaEagle3DraftModel",), "specforge": ("PEagleDraftModel",)}


@check("architecture", "static", "a class or model_type that engines do not take for such a draft, "
       "such as EAGLE-1 declared as EAGLE-3", repairs=True)  # fmt: skip
def architecture(subject: Subject) -> Iterator[Finding]:
    view, config = subject.view, subject.view.config
    if not any(name.startswith(("layers.", "fc")) for name in view.state):
        examples = ", ".join(sorted(subject.files.tensors)[:3])
        evidence = f"no tensor of a draft among {len(view.state)} ({examples} ...)"
        yield error(evidence, "name the directory of a draft", last=True)
    elif view.misnamed:
        if view.merges:
            what = "fc merges one embedding and one hidden state (EAGLE-1/2), declared as EAGLE-3"
        else:
            what = "layer 0 reads embedding and state side by side (EAGLE-3), declared as EAGLE-1"
        vllm, sglang = (view.method.algorithms[engine] for engine in ("vllm", "sglang"))
        yield error(
            f"{what}: served like that, it accepts nothing",
            fix=f'vLLM: method "{vllm}"; SGLang: --speculative-algorithm {sglang}',
            last=True,
        )
    elif view.borrows:
        return
    elif view.layout.nested == NESTED_KEY:
        kind, there = config.get(SPECULATORS_KEY), "speculators_config" in config
        if kind not in ("eagle3", "peagle") or not there:
            yield error(
                f"{SPECULATORS_KEY} is {kind!r}, speculators_config {'is' if there else 'is not'} "
                "there",
                fix="an EAGLE-3 draft says eagle3 or peagle, and names its target",
            )
    else:
        yield from _classes(subject)


def _classes(subject: Subject) -> Iterator[Finding]:
    view, named = subject.view, subject.view.architectures
    qk_norm = view.layer_extras["qk_norm"]
    if view.merges:
        accepted: tuple[str, ...] = (EAGLE1_CLASSES["sglang"], EAGLE1_CLASSES["vllm"])
        plain = ("LlamaForCausalLM",)
        accepted = plain + accepted if view.layout.nested else accepted + plain
    elif qk_norm:
        accepted = (EAGLE3_QWEN3_CLASS, *([EAGLE3_CLASS] if "qk_norm" in view.config else []))
    else:
        accepted = (*_EAGLE3, *_TRAINERS.get(view.layout.name, ()))
    if len(named) != 1 or named[0] not in accepted:
        kind = "EAGLE-1" if view.merges else "EAGLE-3"
        evidence = f"architectures is {named}: no engine loads that as an {kind} draft"
        yield wrong_key("architectures", [accepted[0]], evidence)
    wanted = "qwen3" if qk_norm else "llama"
    if (kind := view.get("model_type")) != wanted:
        layer = "Qwen3 layer (it has q/k norms)" if qk_norm else "Llama layer"
        evidence = f"model_type is {kind!r}: the draft is a {layer} whatever the target is"
        yield wrong_key("model_type", wanted, evidence)


@check("names", "static", "wrapper prefixes, or one layer under two names", repairs=True)
def names(subject: Subject) -> Iterator[Finding]:
    view, prefix = subject.view, subject.view.layout.prefix
    read = {*view.names.values(), *view.junk}
    twice = {name: view.names[view.own_name(name)] for name in view.tensors if name not in read}
    wrapped = [
        name for our_name, name in view.names.items() if name not in _spellings(our_name, prefix)
    ]
    if twice:
        second, first = next(iter(twice.items()))
        same = all(torch.equal(view.tensors[a], view.tensors[b]) for a, b in twice.items())
        count = counted(len(twice), "tensor is", "tensors are")
        evidence = f"{count} stored twice, such as {second} and {first}"
        yield error(evidence, "keep one name", _unwrap if same else None)
    elif wrapped:
        evidence = f"{counted(len(wrapped), 'name is', 'names are')} not the engines', such as "
        evidence += wrapped[0]
        yield error(evidence, f"rename to {view.own_name(wrapped[0])}", _unwrap)


def _spellings(our_name: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor may have in a file whose backbone has this prefix."""
    if prefix and our_name not in ("lm_head.weight", "d2t", "t2d", "mask_hidden"):
        return (prefix + our_name,)
    return our_name, _midlayer(our_name), our_name.replace("input_layernorm", "hidden_norm")


def _midlayer(our_name: str) -> str:
    return our_name.replace("layers.0.", "midlayer.", 1)


def _unwrap(files: DraftFiles) -> None:
    """Keep each tensor once, without wrappers; layer 0 stays `midlayer` if it is called that."""
    files.tensors = {
        _midlayer(our_name) if ".midlayer." in f".{name}" else our_name: files.tensors[name]
        for our_name, name in files.view.names.items()
    }


@check("missing", "static", "tensors that an engine would leave random")
def missing(subject: Subject) -> Iterator[Finding]:
    """Only in layers that are present: `sizes` reports absent ones."""
    view = subject.view
    known = (name for name in expected_shapes(subject) if not name.startswith(view.optional))
    absent = [name for name in known if name not in view.state]
    if not (view.merges or view.borrows):  # else embeddings and head are always the target's
        if "lm_head.weight" in view.state:
            pass
        elif subject.draft_vocab_size < subject.vocab_size:
            absent.append("lm_head.weight")
        else:
            yield note("no lm_head: engines share the target's")
        if "embed_tokens.weight" not in view.state:
            yield note("no embed_tokens: engines share the target's")
    if absent:
        yield error(
            f"{counted(len(absent), 'tensor is', 'tensors are')} missing: {first_few(absent)}; "
            "engines silently load the rest and leave these random",
            fix="export again from the trainer's own checkpoint",
        )


@check("unexpected", "static", "tensors that no engine knows", repairs=True)
def unexpected(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    if view.junk:

        def repair(files: DraftFiles) -> None:
            for name in view.junk:
                del files.tensors[name]

        yield warning(
            f"{counted(len(view.junk), 'tensor is', 'tensors are')} not part of the draft: "
            f"{first_few(view.junk)}; vLLM refuses them",
            "leave them out",
            repair,
        )
    known = {*expected_shapes(subject), *(["mask_hidden"] if view.fuses else [])}
    if extra := [view.names[own] for own in view.state if own not in known]:
        yield error(
            f"{counted(len(extra), 'tensor')} that no {view.method.title} draft has: "
            f"{first_few(extra)}; vLLM refuses them, SGLang skips them",
            fix="is it another kind of draft, or one with biases?",
        )


@check("shape", "static", "tensors whose shape does not fit the others")
def shape(subject: Subject) -> Iterator[Finding]:
    expected, wrong, unreadable = expected_shapes(subject), [], False
    for name, tensor in subject.view.state.items():
        have, want = tuple(tensor.shape), expected.get(name)
        if want is None:
            unreadable |= tensor.numel() == 0
        elif len(have) != len(want) or any(
            b not in (None, a) for a, b in zip(have, want, strict=True)
        ):
            sizes = ", ".join("?" if size is None else str(size) for size in want)
            wrong.append(f"{name} is {list(have)}, expected [{sizes}]")
            unreadable |= len(have) != len(want)
        unreadable |= tensor.numel() == 0
    if wrong or unreadable:
        evidence = "; ".join(wrong[:4]) or "a tensor without values"
        yield error(evidence, "export again; was a matrix transposed or cut?", last=unreadable)


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@check("dtype", "static", "mixed, odd or misdeclared number formats", repairs=True)
def dtype(subject: Subject) -> Iterator[Finding]:
    weights = {n: t for n, t in subject.view.state.items() if n not in ("d2t", "t2d")}
    counts = Counter(tensor.dtype for tensor in weights.values())
    listed = ", ".join(f"{str(k).removeprefix('torch.')} {n}" for k, n in counts.most_common())
    if any(kind not in _FLOATS for kind in counts):
        yield error(f"tensors by number format: {listed}", "serve bf16, fp16 or fp32 weights")
    elif len(counts) > 1:
        yield warning(f"tensors in several number formats: {listed}", "export in one format")
    else:
        stored = str(next(iter(counts), torch.float32)).removeprefix("torch.")
        for key in ("torch_dtype", "dtype"):
            declared = subject.view.flat.get(key)
            if isinstance(declared, str) and declared.removeprefix("torch.") not in (
                stored,
                "auto",
            ):
                yield warning(
                    f"{key} is {declared}, the weights are {stored}: an engine would convert them",
                    f"{key}: {stored}",
                    partial(DraftFiles.put, key=key, value=stored),
                )


@check("values", "static", "weights that are NaN, infinite, or one value throughout")
def values(subject: Subject) -> Iterator[Finding]:
    """Norms of ones are not a fault, only hardly trained. A zero fc.bias is how an fc without a
    bias is written for SGLang."""
    for name, tensor in floats_of(subject):
        first = float(tensor.flatten()[0])
        harmless = tensor.numel() == 1
        harmless |= tensor.ndim == 1 and first == (0.0 if name == "fc.bias" else 1.0)
        if bad := int((~torch.isfinite(tensor)).sum()):
            evidence = f"{name} has {bad:,} NaN or infinite values of {tensor.numel():,}"
            yield error(evidence, "take an earlier checkpoint")
        elif not harmless and bool((tensor == first).all()):
            yield error(f"{name} is {first:g} throughout", "it was never loaded or never saved")


def floats_of(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in subject.view.state.items():
        if tensor.dtype in _FLOATS and tensor.numel():
            yield name, tensor


def first_few(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if items[4:] else "")
