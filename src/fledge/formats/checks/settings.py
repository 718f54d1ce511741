"""Checks of config.json against the tensors and the target: what an engine would build from it."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from fledge.core.errors import BadInput
from fledge.formats.checks.base import Finding, Subject, check, error, warning, wrong_key
from fledge.formats.checks.tensors import Sizes, drop_tensors, sizes_of
from fledge.formats.codec import (
    EAGLE1_CLASSES,
    EAGLE3_CLASS,
    EAGLE3_QWEN3_CLASS,
    NESTED_KEY,
    SPECULATORS_KEY,
)
from fledge.formats.foreign import DraftFiles
from fledge.formats.layouts import BIAS_KEYS
from fledge.methods.shared.placeholder import check_placeholder
from fledge.methods.shared.rotary import rope_parameters

# Classes that vLLM or SGLang have, under this name or with the prefix "Eagle3".
_ARCHITECTURES = (EAGLE3_CLASS, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_TRAINER_CLASSES = {"automodel": ("LlamaEagle3DraftModel",), "specforge": ("PEagleDraftModel",)}


_VLLM_EAGLE1, _SGLANG_EAGLE1 = EAGLE1_CLASSES["vllm"], EAGLE1_CLASSES["sglang"]


@check("architecture", "static", "architectures or model_type that no engine takes for this draft",
       repairs=True)  # fmt: skip
def architecture(subject: Subject) -> Iterator[Finding]:
    config, layout = subject.view.config, subject.view.layout
    if layout.nested == NESTED_KEY:
        kind = config.get(SPECULATORS_KEY)
        if kind not in ("eagle3", "peagle") or "speculators_config" not in config:
            yield error(
                f"{SPECULATORS_KEY} is {kind!r}, speculators_config "
                f"{'is' if 'speculators_config' in config else 'is not'} there",
                fix="an EAGLE-3 draft says eagle3 or peagle, and names its target",
            )
        return
    if not subject.view.misnamed:
        yield from _eagle1_class(subject) if subject.view.merges else _eagle3_class(subject)
    wanted = "qwen3" if subject.view.layer_extras["qk_norm"] else "llama"
    if (kind := subject.view.get("model_type")) != wanted:
        layer = "Qwen3 layer (it has q/k norms)" if wanted == "qwen3" else "Llama layer"
        evidence = f"model_type is {kind!r}: the draft is a {layer} whatever the target is"
        yield wrong_key("model_type", wanted, evidence)


def _eagle3_class(subject: Subject) -> Iterator[Finding]:
    named = subject.view.architectures
    accepted = (*_ARCHITECTURES, *_TRAINER_CLASSES.get(subject.view.layout.name, ()))
    if subject.view.layer_extras["qk_norm"]:
        fledge_class = (EAGLE3_CLASS,) if "qk_norm" in subject.view.config else ()
        accepted = (EAGLE3_QWEN3_CLASS, *fledge_class)
    wanted = accepted[0]
    if len(named) != 1 or named[0] not in accepted:
        evidence = f"architectures is {named}: no engine loads that as an EAGLE-3 draft"
        yield wrong_key("architectures", [wanted], evidence)
    elif named[0] != wanted:
        evidence = f"architectures is {named}: SGLang knows EAGLE-3 drafts as {wanted}"
        yield subject.only_for("sglang", wrong_key("architectures", [wanted], evidence))


def _eagle1_class(subject: Subject) -> Iterator[Finding]:
    named, layout = subject.view.architectures, subject.view.layout
    if len(named) != 1 or named[0] not in (_VLLM_EAGLE1, _SGLANG_EAGLE1, "LlamaForCausalLM"):
        plain = "LlamaForCausalLM" if layout.nested else _SGLANG_EAGLE1
        evidence = f"architectures is {named}: no engine loads that as an EAGLE-1 draft"
        yield wrong_key("architectures", [plain], evidence)
    elif named[0] == _SGLANG_EAGLE1:
        evidence = f"architectures is {named}: vLLM knows EAGLE-1 drafts as {_VLLM_EAGLE1}"
        yield subject.only_for("vllm", wrong_key("architectures", [_VLLM_EAGLE1], evidence))
    elif not layout.nested:  # else SGLang cannot read it under any name
        evidence = f"architectures is {named}: SGLang knows EAGLE-1 drafts as {_SGLANG_EAGLE1}"
        yield subject.only_for("sglang", wrong_key("architectures", [_SGLANG_EAGLE1], evidence))


@check("num-hidden-layers", "static", "more or fewer layers declared than the file has",
       repairs=True)  # fmt: skip
def num_hidden_layers(subject: Subject) -> Iterator[Finding]:
    have, count = len(subject.view.layer_numbers), subject.view.get("num_hidden_layers", 1)
    if have and count != have:
        copied = " (the target's)" if count == subject.target.depth else ""
        evidence = (
            f"num_hidden_layers is {count}{copied}, the file has {have}: an engine builds {count} "
            f"and leaves {max(0, count - have)} random"
        )
        yield wrong_key("num_hidden_layers", have, evidence)


@check("hidden-size", "static", "widths or heads that do not match the tensors", repairs=True)
def hidden_size(subject: Subject) -> Iterator[Finding]:
    sizes, view = sizes_of(subject), subject.view
    if view.merges and sizes.hidden not in (None, sizes.target_hidden):
        yield error(
            f"the draft is {sizes.hidden} wide, the target {sizes.target_hidden}: an EAGLE-1 draft "
            "predicts the target's own states",
            fix="name the target it was trained for",
        )
        return
    for key, actual, declared in (
        ("hidden_size", sizes.hidden, view.get("hidden_size")),
        ("intermediate_size", sizes.intermediate, view.get("intermediate_size")),
        ("target_hidden_size", sizes.target_hidden, view.get("target_hidden_size", sizes.hidden)),
    ):
        if actual is not None and declared != actual:
            yield wrong_key(key, actual, f"{key} is {declared}, the tensors say {actual}")
    yield from _heads(subject, sizes)


def _heads(subject: Subject, sizes: Sizes) -> Iterator[Finding]:
    view = subject.view
    heads, hidden = view.get("num_attention_heads"), view.get("hidden_size")
    if sizes.queries is None or sizes.keys is None or not heads or hidden != sizes.hidden:
        return
    groups = view.get("num_key_value_heads", heads)
    channels = view.get("head_dim", hidden // heads)
    if (heads * channels, groups * channels) == (sizes.queries, sizes.keys):
        return
    target_config = subject.target.draft_config
    fitting: dict[str, int] = {}
    if target_config is not None:
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
        fitting = {key: getattr(target_config, key) for key in keys}
        rows = [heads * target_config.head_dim for heads in list(fitting.values())[:2]]
        fitting = fitting if rows == [sizes.queries, sizes.keys] else {}

    def repair(files: DraftFiles) -> None:
        for key, value in fitting.items():
            files.put(key, value)

    yield error(
        f"{heads} heads, {groups} key heads of {channels} channels make {heads * channels} and "
        f"{groups * channels}; the projections have {sizes.queries} and {sizes.keys} rows",
        fix=f"the target's own fit: {fitting}" if fitting else "correct the heads in config.json",
        repair=repair if fitting else None,
    )


@check("tied-embeddings", "static", "tie_word_embeddings although the draft has its own head",
       repairs=True)  # fmt: skip
def tied_embeddings(subject: Subject) -> Iterator[Finding]:
    has_head = "lm_head.weight" in subject.view.state and not subject.view.merges
    if has_head and subject.view.get("tie_word_embeddings") is True:
        evidence = (
            "tie_word_embeddings is true: an engine would use the embeddings "
            f"({subject.vocab_size:,} rows) for the head ({subject.draft_vocab_size:,} rows)"
        )
        yield wrong_key("tie_word_embeddings", False, evidence)


@check("norm-flags", "static", "norms and biases whose flag and tensors disagree", repairs=True)
def norm_flags(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    for flag, present in (
        ("fc_norm", any(name.startswith("fc_norm.") for name in view.state)),
        ("norm_before_fc", "input_norm.weight" in view.state),
        *((flag, view.layer_extras[flag]) for flag in ("attention_bias", "mlp_bias")),
    ):
        declared = bool(view.get(flag))
        if present and not declared:
            evidence = f"the file has {flag}'s weights, {flag} is not set: engines leave them out"
            yield wrong_key(flag, True, evidence)
        elif declared and not present:
            fix = "export again with these weights"
            yield error(f"{flag} is set, its weights are not in the file", fix)
    unset = view.layout.nested == NESTED_KEY and view.flat.get("norm_before_residual") is None
    if unset and view.config.get(SPECULATORS_KEY) == "eagle3":
        yield warning(
            "norm_before_residual is not set: vLLM then assumes true for a speculators EAGLE-3 "
            "draft",
            fix="write what it was trained with",
        )
    elif view.norm_before_residual and not view.merges:
        evidence = "norm_before_residual is true: vLLM supports it, SGLang does not"
        yield subject.only_for("sglang", error(evidence, fix="serve with vLLM"))


@check("fc-bias", "static", "EAGLE-1: a bias of fc that is lost, or that one engine needs or lacks",
       repairs=True)  # fmt: skip
def fc_bias(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    fc, bias = view.state.get("fc.weight"), view.state.get("fc.bias")
    if not view.merges or fc is None or fc.ndim != 2:
        return
    for key in (key for key in BIAS_KEYS if view.get(key) is not None):
        if bias is None and view.get(key):
            yield error(
                f"{key} is true, the file has no fc.bias: it was lost, engines serve without it",
                fix="export again from the trainer's own checkpoint",
            )
            return
        if view.fc_bias is not None and not view.get(key):
            yield wrong_key(key, True, f"{key} is false, the file has fc.bias")
    if bias is None:
        put = partial(DraftFiles.put_tensor, own="fc.bias", value=fc.new_zeros(len(fc)))
        evidence = "no fc.bias: SGLang's class has one, and leaves it random"
        yield subject.only_for("sglang", error(evidence, "write zeros", put))
    elif view.fc_bias is None:
        name = view.names["fc.bias"]
        evidence = "fc.bias is all zeros: vLLM's fc has no bias, and vLLM refuses the file"
        drop = partial(drop_tensors, doomed=[name])
        yield subject.only_for("vllm", error(evidence, "leave it out", drop))


@check("mask-token", "static", "no placeholder where one is needed, or a real token for it")
def mask_token(subject: Subject) -> Iterator[Finding]:
    view, token = subject.view, subject.view.mask_token_id
    if view.parallel:
        yield from _mask_hidden(subject)
    elif not view.borrows:
        return
    if token is None:
        yield error(
            f"a {view.method.title} draft without mask_token_id: engines refuse it, or embed token "
            "0",
            fix="mask_token_id: the id that the draft was trained with",
        )
    elif not 0 <= token < subject.vocab_size:
        yield error(
            f"mask_token_id {token} is not one of the target's {subject.vocab_size:,} tokens",
            fix="the id that the draft was trained with",
        )
    elif subject.target.tokenizer is not None:
        try:
            check_placeholder(token, subject.target.tokenizer, subject.vocab_size)
        except BadInput as refused:
            fix = "train with a token that the tokenizer never emits"
            yield warning(refused.what + ": real text reads as a placeholder", fix)


def _mask_hidden(subject: Subject) -> Iterator[Finding]:
    mask_hidden, sizes = subject.view.state.get("mask_hidden"), sizes_of(subject)
    if mask_hidden is None:
        yield error(
            "a P-EAGLE draft without mask_hidden: every depth beyond the first reads noise",
            fix="export again with mask_hidden",
        )
    elif sizes.target_hidden is not None and mask_hidden.numel() != sizes.aux * sizes.target_hidden:
        yield error(
            f"mask_hidden has {mask_hidden.numel():,} values, it stands for {sizes.aux} aux states "
            f"of {sizes.target_hidden:,}",
            fix="it is placed before fc: export the trainer's own",
        )


# --- positions -----------------------------------------------------------------------------------
# Checks of rotary positions: with settings unlike training, acceptance falls with length.


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


def take_rope(files: DraftFiles, rope: dict[str, Any]) -> None:
    """Write these settings in both spellings, as `draft.files` does."""
    files.put("rope_parameters", rope)
    files.put("rope_theta", rope["rope_theta"])
    files.put("rope_scaling", rope if rope["rope_type"] != "default" else None)
    if "partial_rotary_factor" not in rope:
        files.put("partial_rotary_factor", None)


@check("rope-conflict", "static", "two rotary bases in one config", repairs=True)
def rope_conflict(subject: Subject) -> Iterator[Finding]:
    flat, target = subject.view.flat, target_rope(subject)
    bases = {"rope_theta": flat.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        bases[f"{key}.rope_theta"] = (flat.get(key) or {}).get("rope_theta")
    stored = {name: float(base) for name, base in bases.items() if base is not None}
    if len(set(stored.values())) < 2:
        return
    listed = ", ".join(f"{name} {base:g}" for name, base in stored.items())
    right = None if target is None else target["rope_theta"]
    sure = target is not None and right in stored.values()
    rope = {**own_rope(subject), "rope_theta": right}
    yield error(
        f"{listed}: which one counts depends on the engine's version",
        fix=f"the target's is {right:g}: write it everywhere" if sure else "write one of them",
        repair=partial(take_rope, rope=rope) if sure else None,
    )


@check("rope", "static", "rotary base, scaling or partial rotation other than the target's",
       repairs=True)  # fmt: skip
def rope(subject: Subject) -> Iterator[Finding]:
    """Our drafts always use the target's settings. Other trainers may differ on purpose:
    `rope-measured` tests that."""
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
        yield error(evidence, fix, partial(take_rope, rope=target))
    else:
        yield warning(evidence, fix="write what it was trained with (rope-measured compares them)")


@check("max-position", "static", "a position limit below the target's", repairs=True)
def max_position(subject: Subject) -> Iterator[Finding]:
    limit = subject.view.get("max_position_embeddings")
    target_limit = getattr(subject.target.text, "max_position_embeddings", None)
    if target_limit is not None and (limit is None or limit < target_limit):
        evidence = (
            f"max_position_embeddings is {limit}, the target's {target_limit}: older vLLM versions "
            "stop rotating positions there, and acceptance collapses beyond"
        )
        yield wrong_key("max_position_embeddings", target_limit, evidence, severity="warning")
