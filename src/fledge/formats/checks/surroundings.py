"""Checks of what surrounds the draft: the aux layers it reads, the tokenizer, the target's number
format, and which engine can load the files as they are."""

import json
import re
from collections.abc import Iterator

from transformers import AutoTokenizer

from fledge.core.errors import BadInput, first_line
from fledge.formats.checks.base import Finding, Subject, check, error, note, warning
from fledge.formats.checks.tensors import sort_aux
from fledge.formats.codec import (
    AUX_KEY,
    NESTED_KEY,
    PlainDraft,
    TargetFacts,
    draft_features,
    get_path,
)
from fledge.formats.engines import ENGINES, EngineName
from fledge.formats.import_draft import own_config
from fledge.target.weights import quantisation_method

_SERVING: tuple[EngineName, ...] = ("vllm", "sglang")
_ROTATED = re.compile(r"quarot|spinquant|hadamard|rotat", re.IGNORECASE)


@check("aux-layers", "static", "aux layers that are not written, too few or many, or out of range")
def aux_layers(subject: Subject) -> Iterator[Finding]:
    view, depth, default = subject.view, subject.target.depth, subject.default_aux
    count, ids = subject.aux_count, view.aux_layer_ids
    stored = get_path(view.config, view.aux_place.path)
    if view.merges:  # only fledge writes which state: engines support only one
        if ids is not None and ids != default:
            yield error(
                f"the aux layers are {stored}: engines give an EAGLE-1 draft the target's last "
                f"hidden state, {default} in our numbering",
                fix="train with target.aux_layer_ids=null",
            )
        return
    if ids is None and default is not None:
        yield note(f"no aux layers in config.json: engines take the outputs of {default}")
    elif ids is None:
        reason = f"a target of {depth} layers is too shallow for the engines' own"
        reason = "engines have none of their own" if view.borrows else reason
        fix = f"write {view.aux_place.path}: the layers it was trained on"
        yield error(f"no aux layers in config.json, and {reason}", fix)
    elif len(ids) != count or len(set(ids)) != count:
        evidence = f"the aux layers are {stored}, expected {count} different numbers"
        yield error(evidence, fix="the layers it was trained on")
    elif not all(0 <= layer < depth for layer in ids):
        yield error(
            f"the aux layers are outputs of {ids}, the target has layers 0..{depth - 1}",
            fix="the layers it was trained on; does the file count from the embedding?",
        )
    places = {place.path: view.aux_at(place) for place in view.written_aux}
    if len({str(layers) for layers in places.values()}) > 1:
        conflict = "; ".join(f"{path} means the outputs of {x}" for path, x in places.items())
        yield error(conflict, fix="write the layers it was trained on in all places")


@check("aux-order", "static", "aux layers in an order that vLLM would undo", repairs=True)
def aux_order(subject: Subject) -> Iterator[Finding]:
    ids = subject.view.aux_layer_ids
    if ids is not None and ids != sorted(ids) and len(set(ids)) == len(ids):
        yield error(
            f"the aux layers are {ids}, not ascending: vLLM sorts them, and fc reads each chunk "
            "as another",
            fix=f"{sorted(ids)}, and the columns of fc in the same order",
            repair=sort_aux,
        )


@check("tokenizer", "static", "a tokenizer beside the draft that is not the target's")
def tokenizer(subject: Subject) -> Iterator[Finding]:
    target_tokenizer = subject.target.tokenizer
    if target_tokenizer is None or not (subject.directory / "tokenizer.json").is_file():
        return
    try:
        draft_vocab = AutoTokenizer.from_pretrained(
            subject.directory, trust_remote_code=False
        ).get_vocab()
    except (OSError, ValueError, KeyError) as failed:
        yield warning(f"the tokenizer beside the draft cannot be read ({first_line(failed)})")
        return
    target_vocab = target_tokenizer.get_vocab()
    if differing := sum(
        draft_vocab.get(token) != token_id for token, token_id in target_vocab.items()
    ):
        yield error(
            f"{differing:,} of the target's {len(target_vocab):,} tokens have another id, or none, "
            "in the tokenizer beside the draft",
            fix="name the target it was trained for",
        )


@check("target-quantised", "static", "a quantized target, whose states differ from the original's")
def target_quantised(subject: Subject) -> Iterator[Finding]:
    method = quantisation_method(subject.target.config)
    if method is None:
        return
    declared = getattr(subject.target.config, "quantization_config", None)
    declared = declared if isinstance(declared, dict) else declared.to_dict()  # type: ignore[union-attr]
    if _ROTATED.search(json.dumps(declared, default=str)):
        yield error(
            f"the target is quantized ({method}) in a rotated basis: its states are not those that "
            "a draft of the original learned",
            fix="train on the states of the weights that are served",
        )
    else:
        yield warning(
            f"the target is quantized ({method}): a draft that learned from another precision "
            "loses acceptance",
            fix="train on the states of the weights that are served, and measure",
        )


@check("serving", "static", "the settings that each engine needs, and what it cannot load")
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
    """(engine, its limitation with these files, what to do about it)."""
    view = subject.view
    prefix = "" if view.layout.name == "fledge" else "fledge import, then "
    commands = {engine: f"{prefix}fledge export --engine {engine}" for engine in _SERVING}
    refused = {engine: list(_refused(subject, engine)) for engine in commands}
    for engine, limits in refused.items():
        yield from ((engine, evidence, fix) for evidence, fix in limits)
    if not refused["sglang"]:  # else no other layout would help
        if view.layout.nested:
            kind = "speculators' format" if view.layout.nested == NESTED_KEY else "a wrapped config"
            yield "sglang", f"{kind}: vLLM reads it, SGLang does not", commands["sglang"]
        elif not view.merges and not any(".midlayer." in f".{name}" for name in view.tensors):
            evidence = "layer 0 is not called midlayer: SGLang 0.5.9 skips it silently"
            yield "sglang", evidence, commands["sglang"]
    for engine, evidence in _aux_convention(subject):
        yield engine, evidence, commands[engine]


def _refused(subject: Subject, name: EngineName) -> Iterator[tuple[str, str]]:
    """What the newest tested version of an engine does not serve, and what works instead."""
    if subject.aux_layer_ids is None:
        return
    try:
        state = dict(subject.view.state)
        if subject.view.fc_bias is None:  # all zeros count as none: see `fc-bias`
            state.pop("fc.bias", None)
        draft = PlainDraft(own_config(subject), state)
    except BadInput:  # other checks report sizes that do not fit
        return
    engine, target = ENGINES[name], TargetFacts(layers=subject.target.depth)
    features = draft_features(draft, target, trained_embeddings=False)
    for limit in engine.refusals(features, engine.tested[-1]):
        yield f"{engine.title} does not serve {limit.feature}", limit.instead


def _aux_convention(subject: Subject) -> Iterator[tuple[EngineName, str]]:
    """Where an engine would understand the stored layer ids as other layers, and how."""
    ids, default = subject.view.aux_layer_ids, subject.default_aux
    written = {
        place.name for place in subject.view.aux_places if subject.view.aux_at(place) is not None
    }
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
