"""Checks of config.json against the tensors, the target and the engines."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from fledge.core.errors import BadInput
from fledge.formats.checks.base import (
    Finding,
    Repair,
    Subject,
    check,
    error,
    note,
    warning,
    wrong_key,
)
from fledge.formats.checks.tensors import Sizes, sizes_of
from fledge.formats.codec import (
    EAGLE1_CLASSES,
    EAGLE3_CLASS,
    NESTED_KEY,
    SPECULATORS_KEY,
    PlainDraft,
    TargetFacts,
    draft_features,
    get_path,
    sorted_chunks,
)
from fledge.formats.engines import ENGINES, EngineName
from fledge.formats.foreign import DraftFiles
from fledge.formats.import_draft import own_config
from fledge.methods.shared.placeholder import check_placeholder
from fledge.methods.shared.rotary import rope_parameters

_SERVING: tuple[EngineName, ...] = ("vllm", "sglang")


@check("sizes", "static", "layers, widths or heads that do not match the tensors, or the target",
       repairs=True)  # fmt: skip
def sizes(subject: Subject) -> Iterator[Finding]:
    voted, view = sizes_of(subject), subject.view
    have, count = len(view.layer_numbers), view.get("num_hidden_layers", 1)
    depth = subject.target.depth
    if have and count != have:
        copied = " (the target's)" if count == depth else ""
        evidence = f"num_hidden_layers is {count}{copied}, the file has {have}: an engine builds "
        evidence += f"{count} and leaves {max(0, count - have)} random"
        yield wrong_key("num_hidden_layers", have, evidence)
    if view.merges and voted.hidden not in (None, voted.target_hidden):
        yield error(
            f"the draft is {voted.hidden} wide, the target {voted.target_hidden}: an EAGLE-1 draft "
            "predicts the target's own states",
            fix="name the target it was trained for",
        )
        return
    declared = {"num_target_layers": depth, "target_hidden_size": voted.target_hidden}
    stated = {key: size for key, size in declared.items() if view.get(key) is not None}
    stated |= {"hidden_size": voted.hidden, "intermediate_size": voted.intermediate}
    for key, size in stated.items():
        if size is not None and view.get(key) != size:
            yield wrong_key(key, size, f"{key} is {view.get(key)}, it must be {size}")
    if view.get("hidden_size") == voted.hidden:
        yield from _heads(subject, voted)


def _heads(subject: Subject, voted: Sizes) -> Iterator[Finding]:
    heads = subject.view.get("num_attention_heads")
    if voted.queries is None or voted.keys is None or not heads:
        return
    groups = subject.view.get("num_key_value_heads", heads)
    channels = subject.view.get("head_dim", subject.view.get("hidden_size") // heads)
    if (heads * channels, groups * channels) != (voted.queries, voted.keys):
        yield error(
            f"{heads} heads, {groups} key heads of {channels} channels make {heads * channels} and "
            f"{groups * channels}; the projections have {voted.queries} and {voted.keys} rows",
            fix="correct the heads in config.json",
        )


@check("flags", "static", "norms, biases or heads whose flag and tensors disagree",
       repairs=True)  # fmt: skip
def flags(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    for flag, present in view.flags.items():
        if present and not view.setting(flag):
            evidence = f"the file has {flag}'s weights, {flag} is not set: engines leave them out"
            yield wrong_key(flag, True, evidence)
        elif view.setting(flag) and not present:
            fix = "export again with these weights"
            yield error(f"{flag} is set, its weights are not in the file", fix)
    own_head = "lm_head.weight" in view.state and not view.merges and not view.borrows
    if own_head and view.get("tie_word_embeddings") is True:
        evidence = "tie_word_embeddings is true: an engine would use the embeddings for the head"
        yield wrong_key("tie_word_embeddings", False, evidence)
    unset = view.flat.get("norm_before_residual") is None
    if view.config.get(SPECULATORS_KEY) == "eagle3" and unset:
        yield warning(
            "norm_before_residual is not set: vLLM then assumes true for a speculators EAGLE-3 "
            "draft",
            fix="write what it was trained with",
        )


@check("mask-token", "static", "no placeholder where one is needed, or a real token for it")
def mask_token(subject: Subject) -> Iterator[Finding]:
    view, token, full = subject.view, subject.view.mask, subject.vocab_size
    if not (view.parallel or view.borrows):
        return
    hidden, width = view.state.get("mask_hidden"), sizes_of(subject).target_hidden
    trained = f"{view.mask_paths[0]}: the id that the draft was trained with"
    if not view.parallel:
        pass
    elif hidden is None:
        evidence = "a P-EAGLE draft without mask_hidden: every depth beyond the first reads noise"
        yield error(evidence, "export again with mask_hidden")
    elif width and hidden.numel() != subject.aux_count * width:
        evidence = f"mask_hidden has {hidden.numel():,} values, it stands for {subject.aux_count} "
        yield error(f"{evidence}aux states of {width:,}", "it is placed before fc")
    if token is None:
        evidence = f"a {view.method.title} draft without a mask token: engines refuse it, or embed "
        yield error(evidence + "token 0", trained)
    elif not 0 <= token < full:
        yield error(f"mask token {token} is not one of the target's {full:,} tokens", trained)
    elif subject.target.tokenizer is not None:
        try:
            check_placeholder(token, subject.target.tokenizer, full)
        except BadInput as refused:
            fix = "train with a token that the tokenizer never emits"
            yield warning(refused.what + ": real text reads as a placeholder", fix)


# --- positions -----------------------------------------------------------------------------------
# With rotary positions unlike those of training, acceptance falls with length.


def own_rope(subject: Subject) -> dict[str, Any]:
    return _plain(rope_parameters(SimpleNamespace(**subject.view.flat)))


def target_rope(subject: Subject) -> dict[str, Any] | None:
    """The rotary settings for drafts of this target; None if no config can be derived."""
    config = subject.target.draft_config
    return None if config is None else _plain(rope_parameters(config))


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    """Settings in comparable form: no null keys, no legacy spelling, no explicit defaults."""
    plain = {key: value for key, value in rope.items() if value is not None and key != "type"}
    plain["rope_theta"] = float(plain["rope_theta"])
    if plain.get("partial_rotary_factor") == 1.0:
        del plain["partial_rotary_factor"]
    return plain


def take_rope(subject: Subject) -> Repair | None:
    """A repair that writes the target's settings in both spellings, as `draft.files` does."""
    rope = target_rope(subject)

    def repair(files: DraftFiles) -> None:
        assert rope is not None
        files.put("rope_parameters", rope)
        files.put("rope_theta", rope["rope_theta"])
        files.put("rope_scaling", rope if rope["rope_type"] != "default" else None)
        if "partial_rotary_factor" not in rope:
            files.put("partial_rotary_factor", None)

    return None if rope is None else repair


@check("rope", "static", "rotary base, scaling or partial rotation other than the target's, or two "
       "bases", repairs=True)  # fmt: skip
def rope(subject: Subject) -> Iterator[Finding]:
    """Our drafts always use the target's settings. Other trainers may differ on purpose:
    `rope-measured` tests that."""
    draft, target, flat = own_rope(subject), target_rope(subject), subject.view.flat
    places = {"": flat, **{f"{k}.": flat.get(k) or {} for k in ("rope_parameters", "rope_scaling")}}
    bases = {f"{place}rope_theta": keys.get("rope_theta") for place, keys in places.items()}
    stored = {name: float(base) for name, base in bases.items() if base is not None}
    if len(set(stored.values())) > 1:
        listed = ", ".join(f"{name} {base:g}" for name, base in stored.items())
        evidence = f"{listed}: which one counts depends on the engine's version"
        sure = target is not None and target["rope_theta"] in stored.values()
        yield error(evidence, "write one of them", take_rope(subject) if sure else None)
    elif target is not None and draft != target:
        differing = [
            f"{key} {draft.get(key, 'absent')} instead of {target.get(key, 'absent')}"
            for key in sorted({*draft, *target})
            if draft.get(key) != target.get(key)
        ]
        evidence = f"its positions are not the target's: {', '.join(differing)}"
        if subject.view.layout.name == "fledge":
            fix = "drafts of fledge use their target's rotary settings: write those"
            yield error(evidence, fix, take_rope(subject))
        else:
            yield warning(evidence, "write what it was trained with (rope-measured compares them)")


@check("max-position", "static", "a position limit below the target's", repairs=True)
def max_position(subject: Subject) -> Iterator[Finding]:
    key = "max_position_embeddings"
    limit, wanted = subject.view.get(key), getattr(subject.target.text, key, None)
    if wanted is not None and (limit is None or limit < wanted):
        yield warning(
            f"{key} is {limit}, the target's {wanted}: older vLLM versions stop rotating positions "
            "there, and acceptance collapses beyond",
            f"{key}: {wanted}",
            partial(DraftFiles.put, key=key, value=wanted),
        )


# --- the target and the engines ------------------------------------------------------------------


@check("aux-layers", "static", "aux layers that are not written, too few or many, out of range, or "
       "not ascending", repairs=True)  # fmt: skip
def aux_layers(subject: Subject) -> Iterator[Finding]:
    view, depth, default = subject.view, subject.target.depth, subject.default_aux
    count, ids = subject.aux_count, view.aux_layer_ids
    stored, trained = get_path(view.config, view.aux_place.path), "the layers it was trained on"
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
        fix = f"write {view.aux_place.path}: {trained}"
        yield error(f"no aux layers in config.json, and {reason}", fix)
    elif len(ids) != count or len(set(ids)) != count:
        yield error(f"the aux layers are {stored}, expected {count} different numbers", trained)
    elif not all(0 <= layer < depth for layer in ids):
        yield error(
            f"the aux layers are outputs of {ids}, the target has layers 0..{depth - 1}",
            fix=f"{trained}; does the file count from the embedding?",
        )
    elif ids != sorted(ids):
        yield error(
            f"the aux layers are {ids}, not ascending: vLLM sorts them, and fc reads each chunk "
            "as another",
            fix=f"{sorted(ids)}, and the columns of fc in the same order",
            repair=_sort_aux,
        )
    places = {place.path: view.aux_at(place) for place in view.written_aux}
    if len({str(layers) for layers in places.values()}) > 1:
        conflict = "; ".join(f"{path} means the outputs of {x}" for path, x in places.items())
        yield error(conflict, fix=f"write {trained} in all places")


def _sort_aux(files: DraftFiles) -> None:
    """Sort the aux layers in ascending order, and what reads their chunks with them."""
    ids = files.view.aux_layer_ids or []
    for name, value in sorted_chunks(ids, files.view.state).items():
        files.put_tensor(name, value)
    files.put_aux(sorted(ids))


@check("serving", "static", "the settings that each engine needs, and what it cannot load")
def serving(subject: Subject) -> Iterator[Finding]:
    view, method = subject.view, subject.view.method
    speculative = f'vLLM: method "{method.algorithms["vllm"]}"'
    if view.parallel:
        yield note(f"{method.title}. {speculative}, parallel_drafting in --speculative-config")
    else:
        other = "EAGLE3" if view.merges else "EAGLE"
        yield note(
            f"{speculative}; SGLang: --speculative-algorithm {method.algorithms['sglang']} "
            f"({other} would accept exactly nothing, without a warning)"
        )
    for engine in _SERVING:
        refused = list(_refused(subject, engine))
        for evidence, instead in refused:
            yield subject.only_for(engine, evidence, instead)
        if not refused:  # else no other layout would help
            prefix = "" if view.layout.name == "fledge" else "fledge import, then "
            for evidence in _misread(subject, engine):
                yield subject.only_for(engine, evidence, f"{prefix}fledge export --engine {engine}")


def _refused(subject: Subject, name: EngineName) -> Iterator[tuple[str, str]]:
    """What the newest tested version of an engine does not serve, and what works instead."""
    view, engine = subject.view, ENGINES[name]
    if view.norm_before_residual and name == "sglang":
        yield "norm_before_residual is true: vLLM supports it, SGLang does not", "serve with vLLM"
    if subject.aux_layer_ids is None:
        return
    try:
        state = {n: t for n, t in view.state.items() if n != "fc.bias" or view.fc_bias is not None}
        draft = PlainDraft(own_config(subject), state)
    except BadInput:  # other checks report sizes that do not fit
        return
    facts = TargetFacts(layers=subject.target.depth)
    features = draft_features(draft, facts, trained_embeddings=False)
    for limit in engine.refusals(features, engine.tested[-1]):
        yield f"{engine.title} does not serve {limit.feature}", limit.instead


def _misread(subject: Subject, engine: EngineName) -> Iterator[str]:
    """What an engine would read differently in these files, or not find."""
    view, vllm = subject.view, engine == "vllm"
    ids, named = view.aux_layer_ids, view.architectures[:1]
    at = {place.name for place in view.aux_places if view.aux_at(place) is not None}
    if view.layout.nested and not vllm:
        kind = "speculators' format" if view.layout.nested == NESTED_KEY else "a wrapped config"
        yield f"{kind}: vLLM reads it, SGLang does not"
    elif view.merges:
        other = EAGLE1_CLASSES["sglang" if vllm else "vllm"]
        if named == [other] or (not vllm and named != [EAGLE1_CLASSES["sglang"]]):
            yield f"architectures is {named}: it knows EAGLE-1 drafts as {EAGLE1_CLASSES[engine]}"
        if vllm and "fc.bias" in view.state and view.fc_bias is None:
            yield "fc.bias is all zeros: vLLM's fc has no bias, and vLLM refuses the file"
        if not vllm and "fc.bias" not in view.state:
            yield "no fc.bias: SGLang's class has one, and leaves it random"
    elif vllm and view.layout.prefix:
        yield f"names begin with '{view.layout.prefix}': SGLang takes them, vLLM refuses to load"
    elif not vllm:
        if named != [EAGLE3_CLASS] and not view.layer_extras["qk_norm"]:
            yield f"architectures is {named}: SGLang knows EAGLE-3 drafts as {EAGLE3_CLASS}"
        if not any(".midlayer." in f".{name}" for name in view.tensors):
            yield "layer 0 is not called midlayer: SGLang 0.5.9 skips it silently"
    if vllm and "sglang" in at and "vllm" not in at:
        yield f"eagle_config counts layers: vLLM takes each of {ids} for one lower"
    elif ids not in (None, subject.default_aux) and not at & {engine, "sglang"}:
        yield f"{ENGINES[engine].title} does not find the layers where they are written"
