"""Checks of config.json against the tensors and the target: what an engine would build from it."""

from collections.abc import Iterator

from fledge.diagnosis.checks.base import Finding, Subject, check, error, warning
from fledge.diagnosis.checks.sizes import sizes_of
from fledge.diagnosis.foreign import SPECULATORS_KEY, DraftFiles

# What vLLM or SGLang have a class for, under this name or with "Eagle3" put before it.
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_OWN_CLASSES = {"automodel": ("LlamaEagle3DraftModel",), "specforge": ("PEagleDraftModel",)}


@check("architecture", "static", "architectures or model_type that no engine takes for EAGLE-3",
       repairs=True)  # fmt: skip
def architecture(subject: Subject) -> Iterator[Finding]:
    config, layout = subject.view.config, subject.view.layout
    if layout.nested:
        kind = config.get(SPECULATORS_KEY)
        if kind not in ("eagle3", "peagle") or "speculators_config" not in config:
            yield error(
                f"{SPECULATORS_KEY} is {kind!r}, speculators_config "
                f"{'is' if 'speculators_config' in config else 'is not'} there",
                fix="an EAGLE-3 draft says eagle3 or peagle, and names its target",
            )
        return
    named = config.get("architectures") or []
    known = (*_ARCHITECTURES, *_OWN_CLASSES.get(layout.name, ()))
    wanted = _ARCHITECTURES[0]
    if len(named) != 1 or named[0] not in known:
        yield error(
            f"architectures is {named}: no engine loads that as an EAGLE-3 draft",
            fix=f'architectures: ["{wanted}"]',
            repair=lambda files: files.put("architectures", [wanted]),
        )
    elif named[0] != wanted:
        yield subject.needs(
            "sglang",
            f"architectures is {named}: SGLang knows EAGLE-3 drafts as {wanted}",
            fix=f'architectures: ["{wanted}"]',
            repair=lambda files: files.put("architectures", [wanted]),
        )
    if config.get("model_type") != "llama":
        yield error(
            f"model_type is {config.get('model_type')!r}: the draft is a Llama layer whatever the "
            "target is",
            fix='model_type: "llama"',
            repair=lambda files: files.put("model_type", "llama"),
        )


@check("num-hidden-layers", "static", "more or fewer layers declared than the file has",
       repairs=True)  # fmt: skip
def num_hidden_layers(subject: Subject) -> Iterator[Finding]:
    have, count = len(subject.view.layer_numbers), subject.view.get("num_hidden_layers", 1)
    if not have or count == have:
        return
    copied = " (the target's)" if count == subject.target.depth else ""
    yield error(
        f"num_hidden_layers is {count}{copied}, the file has {have}: an engine builds {count} and "
        f"leaves {max(0, count - have)} random",
        fix=f"num_hidden_layers: {have}",
        repair=lambda files: files.put("num_hidden_layers", have),
    )


@check("hidden-size", "static", "widths or heads that are not the tensors'", repairs=True)
def hidden_size(subject: Subject) -> Iterator[Finding]:
    sizes, view = sizes_of(subject), subject.view
    for key, have, declared in (
        ("hidden_size", sizes.hidden, view.get("hidden_size")),
        ("intermediate_size", sizes.intermediate, view.get("intermediate_size")),
        (
            "target_hidden_size",
            sizes.target_hidden,
            view.get("target_hidden_size", sizes.hidden),
        ),
    ):
        if have is not None and declared != have:
            yield error(
                f"{key} is {declared}, the tensors say {have}",
                fix=f"{key}: {have}",
                repair=lambda files, key=key, have=have: files.put(key, have),  # type: ignore[misc]
            )
    yield from _heads(subject)


def _heads(subject: Subject) -> Iterator[Finding]:
    sizes, view = sizes_of(subject), subject.view
    heads, hidden = view.get("num_attention_heads"), view.get("hidden_size")
    if sizes.queries is None or sizes.keys is None or not heads or hidden != sizes.hidden:
        return
    groups = view.get("num_key_value_heads", heads)
    channels = view.get("head_dim", hidden // heads)
    if (heads * channels, groups * channels) == (sizes.queries, sizes.keys):
        return
    theirs = subject.target.draft_config
    fitting: dict[str, int] | None = None
    if theirs is not None and (sizes.queries, sizes.keys) == (
        theirs.num_attention_heads * theirs.head_dim,
        theirs.num_key_value_heads * theirs.head_dim,
    ):
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
        fitting = {key: getattr(theirs, key) for key in keys}

    def repair(files: DraftFiles) -> None:
        for key, value in (fitting or {}).items():
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
    if subject.view.get("tie_word_embeddings") is True and "lm_head.weight" in subject.view.state:
        yield error(
            "tie_word_embeddings is true: an engine would use the embeddings "
            f"({subject.vocab_size:,} rows) for the head ({subject.draft_vocab_size:,} rows)",
            fix="tie_word_embeddings: false",
            repair=lambda files: files.put("tie_word_embeddings", False),
        )


@check("norm-flags", "static", "norms whose flag and tensors disagree", repairs=True)
def norm_flags(subject: Subject) -> Iterator[Finding]:
    state, view = subject.view.state, subject.view
    for flag, present in (
        ("fc_norm", any(name.startswith("fc_norm.") for name in state)),
        ("norm_before_fc", "input_norm.weight" in state),
    ):
        declared = bool(view.get(flag))
        if present and not declared:
            yield error(
                f"the file has {flag}'s weights, {flag} is not set: engines leave the norm out",
                fix=f"{flag}: true",
                repair=lambda files, flag=flag: files.put(flag, True),  # type: ignore[misc]
            )
        elif declared and not present:
            yield error(
                f"{flag} is set, its weights are not in the file",
                fix="export again with the norm's weights",
            )
    silent = view.layout.nested and view.flat.get("norm_before_residual") is None
    if silent and view.config.get(SPECULATORS_KEY) == "eagle3":
        yield warning(
            "norm_before_residual is not written: vLLM takes a speculators EAGLE-3 draft's "
            "silence for true",
            fix="write what it was trained with",
        )
    elif view.norm_before_residual:
        yield subject.needs(
            "sglang",
            "norm_before_residual is true: vLLM does it, SGLang does not",
            fix="serve with vLLM",
        )


@check("mask-token", "static", "P-EAGLE without a placeholder, or with a real token for it")
def mask_token(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    if not view.parallel:
        return
    yield from _mask_hidden(subject)
    token = view.mask_token_id
    if type(token) is not int:
        yield error(
            "a P-EAGLE draft without mask_token_id: engines refuse it, or embed token 0",
            fix="mask_token_id: the id that the draft was trained with",
        )
    elif not 0 <= token < subject.vocab_size:
        yield error(
            f"mask_token_id {token} is not one of the target's {subject.vocab_size:,} tokens",
            fix="the id that the draft was trained with",
        )
    elif subject.target.tokenizer is not None:
        from fledge.core.errors import BadInput
        from fledge.draft.mask_token import check_mask_token_id

        try:
            check_mask_token_id(token, subject.target.tokenizer, subject.vocab_size)
        except BadInput as refused:
            yield warning(
                refused.what + ": real text reads as a placeholder",
                fix="train with a token that the tokenizer never emits",
            )


def _mask_hidden(subject: Subject) -> Iterator[Finding]:
    held, sizes = subject.view.state.get("mask_hidden"), sizes_of(subject)
    if held is None:
        yield error(
            "a P-EAGLE draft without mask_hidden: every depth beyond the first reads noise",
            fix="export again with mask_hidden",
        )
    elif sizes.target_hidden is not None and held.numel() != sizes.aux * sizes.target_hidden:
        yield error(
            f"mask_hidden has {held.numel():,} values, it stands for {sizes.aux} aux states of "
            f"{sizes.target_hidden:,}",
            fix="it is placed before fc: export the trainer's own",
        )
