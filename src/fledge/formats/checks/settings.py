"""Checks of config.json against the tensors, the target and the engines."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from fledge.core.errors import BadInput
from fledge.formats.checks.base import Finding, Repair, Subject, error, note, warning, wrong_key
from fledge.formats.codec import (
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


def sizes(subject: Subject) -> Iterator[Finding]:
    """Layers, widths or vocabularies that do not match the tensors, or the target."""
    view, target = subject.view, subject.target
    shown: dict[str, int] = {"vocab_size": subject.vocab_size}
    if view.layer_numbers:
        shown["num_hidden_layers"] = len(view.layer_numbers)
    down = view.state.get("layers.0.mlp.down_proj.weight")
    if down is not None and down.ndim == 2:
        shown["hidden_size"], shown["intermediate_size"] = down.shape
    rows = subject.draft_vocab_size
    if rows != subject.vocab_size or view.get("draft_vocab_size") is not None:
        shown["draft_vocab_size"] = rows
    of_target = {"num_target_layers": target.depth, "target_hidden_size": target.text.hidden_size}
    shown |= {key: size for key, size in of_target.items() if view.get(key) is not None}
    for key, size in shown.items():
        if (stated := view.get(key)) != size:
            evidence = f"{key} is {stated}, it must be {size}"
            if key == "num_hidden_layers":
                evidence += f": an engine builds {stated} layers and leaves the others random"
            yield wrong_key(key, size, evidence)


def flags(subject: Subject) -> Iterator[Finding]:
    """Norms, biases or heads whose flag and tensors disagree."""
    view = subject.view
    for flag, present in view.flags.items():
        if present and not view.get(flag):
            evidence = f"the file has {flag}'s weights, {flag} is not set: engines leave them out"
            yield wrong_key(flag, True, evidence)
        elif view.get(flag) and not present:
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


def mask_token(subject: Subject) -> Iterator[Finding]:
    """No placeholder where one is needed, or a real token for it."""
    view, token, full = subject.view, subject.view.mask, subject.vocab_size
    if not view.parallel and (view.merges or not view.borrows):
        return
    trained = f"{view.mask_paths[0]}: the id that the draft was trained with"
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


def rope(subject: Subject) -> Iterator[Finding]:
    """Rotary base, scaling or partial rotation other than the target's. Our drafts always use the
    target's; other trainers may differ on purpose, which `rope-measured` tests."""
    draft, target = own_rope(subject), target_rope(subject)
    if target is None or draft == target:
        return
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


def max_position(subject: Subject) -> Iterator[Finding]:
    """A position limit below the target's."""
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


def aux_layers(subject: Subject) -> Iterator[Finding]:
    """Aux layers that are not written, too few or many, out of range, or not ascending."""
    view, depth, default = subject.view, subject.target.depth, subject.default_aux
    count, ids = subject.aux_count, view.aux_layer_ids
    stored, trained = get_path(view.config, view.aux_place.path), "the layers it was trained on"
    if view.merges:  # it reads the last state, whatever is written
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


def _sort_aux(files: DraftFiles) -> None:
    """Sort the aux layers in ascending order, and what reads their chunks with them."""
    ids = files.view.aux_layer_ids or []
    for name, value in sorted_chunks(ids, files.view.state).items():
        files.put_tensor(name, value)
    files.put_aux(sorted(ids))


def serving(subject: Subject) -> Iterator[Finding]:
    """The settings that each engine needs, and what it cannot load."""
    view, method = subject.view, subject.view.method
    if view.borrows and not view.merges:  # blocks: one flat layout, which both engines read
        return
    speculative = f'vLLM: method "{method.algorithms["vllm"]}"'
    if view.parallel:
        yield note(f"{method.title}. {speculative}, parallel_drafting in --speculative-config")
    else:
        other = "EAGLE3" if view.merges else "EAGLE"
        yield note(
            f"{speculative}; SGLang: --speculative-algorithm {method.algorithms['sglang']} "
            f"({other} would accept exactly nothing, without a warning)"
        )
    places = {place.name for place in view.written_aux}
    misplaced = not view.merges and places != {"fledge"} and bool(places)
    misplaced |= not view.merges and view.aux_layer_ids not in (None, subject.default_aux)
    for name in _SERVING:
        title, refused = ENGINES[name].title, list(_refused(subject, name))
        for evidence, instead in refused:
            yield subject.only_for(name, evidence, instead)
        if refused:  # no other layout would help
            continue
        prefix = "" if view.layout.name == "fledge" else "fledge import, then "
        fix = f"{prefix}fledge export --engine {name}"
        if name not in view.layout.read_by:
            yield subject.only_for(name, f"{title} misreads the {view.layout.name} layout", fix)
        elif misplaced and name not in places:
            evidence = f"{title} takes other layers than {view.aux_layer_ids}: where these are "
            yield subject.only_for(name, evidence + "written it does not look, or counts", fix)


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
