"""Checks of what lies around the draft: the layers it listens to, the tokenizer, the target's
number format, and which engine can take the files as they are."""

import json
import re
from collections.abc import Iterator

import torch
from transformers import AutoTokenizer

from fledge.core.errors import BadInput, first_line
from fledge.diagnosis.checks.base import Finding, Subject, check, error, note, warning
from fledge.diagnosis.foreign import AUX_KEY, AUX_PLACES, DraftFiles
from fledge.diagnosis.import_draft import own_config
from fledge.diagnosis.layouts import NESTED_KEY
from fledge.export.engines import ENGINES, EngineName
from fledge.export.layout import PlainDraft, TargetFacts, draft_features
from fledge.target.weights import quantisation_method

_SERVING: tuple[EngineName, ...] = ("vllm", "sglang")
_ROTATED = re.compile(r"quarot|spinquant|hadamard|rotat", re.IGNORECASE)


@check("aux-layers", "static", "aux layers that are not written, too few or many, or out of range")
def aux_layers(subject: Subject) -> Iterator[Finding]:
    view, depth, default = subject.view, subject.target.depth, subject.default_aux
    if view.merges:
        yield from _last_state(subject)
        return
    count, ids = view.get("num_aux_hidden_states", 3), view.aux_layer_ids
    if view.stored_aux is None and default is not None:
        yield note(f"no aux layers in config.json: engines take the outputs of {default}")
    elif view.stored_aux is None:
        yield error(
            f"no aux layers in config.json, and a target of {depth} layers is too shallow for "
            "the engines' own",
            fix=f"write {AUX_KEY}: the layers it was trained on",
        )
    elif ids is None or len(ids) != count or len(set(ids)) != count:
        evidence = f"the aux layers are {view.stored_aux}, expected {count} different numbers"
        yield error(evidence, fix="the layers it was trained on")
    elif not all(0 <= layer < depth for layer in ids):
        yield error(
            f"the aux layers are outputs of {ids}, the target has layers 0..{depth - 1}",
            fix="the layers it was trained on; does the file count from the embedding?",
        )
    given = {at.path: layers for at in AUX_PLACES if (layers := view.aux_at(at)) is not None}
    if len({tuple(layers) for layers in given.values()}) > 1:
        words = "; ".join(f"{path} means the outputs of {layers}" for path, layers in given.items())
        yield error(words, fix="write the layers it was trained on in all places")


def _last_state(subject: Subject) -> Iterator[Finding]:
    """EAGLE-1: nobody else writes which state it reads, for engines know only one."""
    view = subject.view
    if view.stored_aux is not None and view.aux_layer_ids != subject.default_aux:
        yield error(
            f"the aux layers are {view.stored_aux}: engines show an EAGLE-1 draft the target's "
            f"last hidden state, {subject.default_aux} in our counting",
            fix="train with target.aux_layer_ids=null",
        )


@check("aux-order", "static", "aux layers in an order that vLLM would undo", repairs=True)
def aux_order(subject: Subject) -> Iterator[Finding]:
    ids = subject.view.aux_layer_ids
    if ids is not None and ids != sorted(ids) and len(set(ids)) == len(ids):
        yield error(
            f"the aux layers are {ids}, not ascending: vLLM sorts them, and fc reads each chunk "
            "as another",
            fix=f"{sorted(ids)}, and the columns of fc in the same order",
            repair=_sort_aux,
        )


def _sort_aux(files: DraftFiles) -> None:
    """The same draft with its chunks in ascending order."""
    state, ids = files.view.state, files.view.aux_layer_ids
    assert ids is not None
    order = sorted(range(len(ids)), key=lambda place: ids[place])
    for own in {"fc.weight", "mask_hidden", "input_norm.weight"} & state.keys():
        chunks = state[own].chunk(len(ids), dim=-1)
        files.put_tensor(own, torch.cat([chunks[place] for place in order], dim=-1))
    norms = [f"fc_norm.{place}.weight" for place in range(len(ids))]
    if all(name in state for name in norms):
        for name, place in zip(norms, order, strict=True):
            files.put_tensor(name, state[norms[place]])
    files.put_aux(sorted(ids))


@check("capture-point", "static", "an aux layer whose state some trainers capture after the norm")
def capture_point(subject: Subject) -> Iterator[Finding]:
    ids, last = subject.aux_layer_ids, subject.target.depth - 1
    if ids is not None and last in ids and not subject.view.merges:
        yield warning(
            f"layer {last} is the target's last: transformers shows its state after the final "
            "norm, engines before it",
            fix="train on the state before the norm (capture-measured compares them)",
        )


@check("tokenizer", "static", "a tokenizer beside the draft that is not the target's")
def tokenizer(subject: Subject) -> Iterator[Finding]:
    theirs = subject.target.tokenizer
    if theirs is None or not (subject.directory / "tokenizer.json").is_file():
        return
    try:
        own = AutoTokenizer.from_pretrained(subject.directory, trust_remote_code=False).get_vocab()
    except (OSError, ValueError, KeyError) as failed:
        yield warning(f"the tokenizer beside the draft cannot be read ({first_line(failed)})")
        return
    vocabulary = theirs.get_vocab()
    if differing := sum(own.get(token) != number for token, number in vocabulary.items()):
        yield error(
            f"{differing:,} of the target's {len(vocabulary):,} tokens have another id, or none, "
            "in the tokenizer beside the draft",
            fix="name the target it was trained for",
        )


@check("target-quantised", "static", "a quantised target, whose states differ from the original's")
def target_quantised(subject: Subject) -> Iterator[Finding]:
    method = quantisation_method(subject.target.config)
    if method is None:
        return
    declared = getattr(subject.target.config, "quantization_config", None)
    declared = declared if isinstance(declared, dict) else declared.to_dict()  # type: ignore[union-attr]
    if _ROTATED.search(json.dumps(declared, default=str)):
        yield error(
            f"the target is quantised ({method}) in a rotated basis: its states are not those that "
            "a draft of the original learnt",
            fix="train on the states of the weights that are served",
        )
    else:
        yield warning(
            f"the target is quantised ({method}): a draft that learnt from another precision loses "
            "acceptance",
            fix="train on the states of the weights that are served, and measure",
        )


@check("serving", "static", "what each engine needs to be told, and what it cannot take")
def serving(subject: Subject) -> Iterator[Finding]:
    method = subject.view.method
    speculative = f'vLLM: method "{method.algorithms["vllm"]}"'
    if method.vllm_settings:
        settings = json.dumps(dict(method.vllm_settings)).strip("{}")
        flags = "" if subject.view.layout.nested == NESTED_KEY else f" and {settings}"
        yield note(f"{method.title}. {speculative}{flags} in --speculative-config")
    else:
        other = "EAGLE3" if subject.view.merges else "EAGLE"
        yield note(
            f"{speculative}; SGLang: --speculative-algorithm {method.algorithms['sglang']} "
            f"({other} would accept exactly nothing, without a warning)"
        )
    for engine, evidence, fix in _limits(subject):
        yield subject.only_for(engine, error(evidence, fix))


def _limits(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """(engine, what it makes of these files, what to do)."""
    view = subject.view
    first = "" if view.layout.name == "fledge" else "fledge import, then "
    again = {engine: f"{first}fledge export --engine {engine}" for engine in _SERVING}
    refused = {engine: list(_refused(subject, engine)) for engine in again}
    for engine, limits in refused.items():
        yield from ((engine, evidence, fix) for evidence, fix in limits)
    if not refused["sglang"]:  # else no spelling would help
        if view.layout.nested:
            kind = "speculators' format" if view.layout.nested == NESTED_KEY else "a wrapped config"
            yield "sglang", f"{kind}: vLLM reads it, SGLang does not", again["sglang"]
        elif not view.merges and not any(".midlayer." in f".{name}" for name in view.tensors):
            evidence = "layer 0 is not called midlayer: SGLang 0.5.9 skips it silently"
            yield "sglang", evidence, again["sglang"]
    for engine, evidence in _aux_convention(subject):
        yield engine, evidence, again[engine]


def _refused(subject: Subject, name: EngineName) -> Iterator[tuple[str, str]]:
    """What the newest tested version of an engine does not serve, and what would."""
    if subject.aux_layer_ids is None:
        return
    try:
        state = dict(subject.view.state)
        if subject.view.fc_bias is None:  # zeros are none: `fc-bias` speaks of them
            state.pop("fc.bias", None)
        draft = PlainDraft(own_config(subject), state)
    except BadInput:  # sizes that do not fit have been reported
        return
    engine, target = ENGINES[name], TargetFacts(layers=subject.target.depth)
    features = draft_features(draft, target, trained_embeddings=False)
    for limit in engine.refusals(features, engine.tested[-1]):
        yield f"{engine.title} does not serve {limit.feature}", limit.instead


def _aux_convention(subject: Subject) -> Iterator[tuple[EngineName, str]]:
    """The same list of layers means other layers to the other engine."""
    ids, default = subject.view.aux_layer_ids, subject.default_aux
    written = {place.name for place in AUX_PLACES if subject.view.aux_at(place) is not None}
    if ids is None:
        return
    if "sglang" in written and "vllm" not in written:
        yield "vllm", f"eagle_config counts layers: vLLM takes each of {ids} for one lower"
    for engine in _SERVING:
        if ids != default and not written & {engine, "sglang"}:
            key = AUX_KEY if engine == "vllm" else f"eagle_config.{AUX_KEY}"
            title = ENGINES[engine].title
            taken = f"the outputs of {default}" if default else "layers of its own choice"
            yield engine, f"no {key}: {title} takes {taken}, not {ids}"
