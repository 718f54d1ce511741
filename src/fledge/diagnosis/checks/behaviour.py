"""Checks by decoding: what the files accept, and whether another reading accepts more."""

from collections.abc import Iterator

from fledge.diagnosis.checks.base import Finding, Repair, Subject, check, error, note, warning
from fledge.diagnosis.checks.positions import take_rope, target_rope
from fledge.diagnosis.checks.probe import DEPTHS, Probe

_UNSEEN = (
    "what files do not show: labels or masks shifted, hidden states of another request, truncated "
    "answers, a leaking mask in training; `fledge data preview` shows what was supervised"
)


def _probe(subject: Subject) -> Probe:
    assert subject.probe is not None, "behavioural checks run with a probe"
    return subject.probe


def _measured(
    subject: Subject, name: str, written: str, better: str, fix: str, repair: Repair | None
) -> Iterator[Finding]:
    step = _probe(subject).steps.get(name)
    if step is not None:
        _, before, _, after = step
        yield error(f"{written}: {before}; {better}: {after}", fix, repair)


@check("aux-shifted", "behavioural", "aux layers one too low or too high, by replay of both",
       repairs=True)  # fmt: skip
def aux_shifted(subject: Subject) -> Iterator[Finding]:
    step = _probe(subject).steps.get("aux-shifted")
    if step is None:
        if lean := _probe(subject).leaning("aux-shifted"):
            yield note(
                f"the outputs of {list(lean[0].aux_layer_ids)} accept more, but only by "
                f"{lean[1]:.1f} standard errors",
                fix="--prompts 32 --max-new-tokens 128 tells",
            )
        return
    before, after = list(step[0].aux_layer_ids), list(step[2].aux_layer_ids)
    yield from _measured(
        subject,
        "aux-shifted",
        f"listening to the outputs of {before}",
        f"to {after}",
        f"it was trained on {after}: the trainer counts layers otherwise than the file",
        lambda files: files.put_aux(after),
    )


@check("norm-output", "behavioural", "norm_output set or unset against the training",
       repairs=True)  # fmt: skip
def norm_output(subject: Subject) -> Iterator[Finding]:
    written = _probe(subject).as_written.norm_output
    yield from _measured(
        subject,
        "norm-output",
        f"norm_output {str(written).lower()}",
        str(not written).lower(),
        f"norm_output: {str(not written).lower()}",
        lambda files: files.put("norm_output", not written),
    )


@check("norm-residual", "behavioural", "norm_before_residual set or unset against the training",
       repairs=True)  # fmt: skip
def norm_residual(subject: Subject) -> Iterator[Finding]:
    written = _probe(subject).as_written.norm_residual
    yield from _measured(
        subject,
        "norm-residual",
        f"norm_before_residual {str(written).lower()}",
        str(not written).lower(),
        f"norm_before_residual: {str(not written).lower()}",
        lambda files: files.put("norm_before_residual", not written),
    )


@check("rope-measured", "behavioural", "rotary settings with which it accepts less than with the "
       "target's", repairs=True)  # fmt: skip
def rope_measured(subject: Subject) -> Iterator[Finding]:
    theirs = target_rope(subject)
    yield from _measured(
        subject,
        "rope-measured",
        "with the file's rotary settings",
        "with the target's",
        "write the target's settings",
        None if theirs is None else take_rope(theirs),
    )


@check("capture-measured", "behavioural", "training on the last layer's state after the final norm")
def capture_measured(subject: Subject) -> Iterator[Finding]:
    yield from _measured(
        subject,
        "capture-measured",
        "with the last layer's state as engines capture it",
        "after the final norm",
        "it was trained on transformers' last hidden state: train on the layer's own output",
        None,
    )


@check("labels", "behavioural", "a draft that says the token before or behind the one it should")
def labels(subject: Subject) -> Iterator[Finding]:
    shares = _probe(subject).matches_by_offset()
    best = max(shares, key=lambda offset: shares[offset])
    if best != 2 and shares[best] > max(0.3, shares[2] + 0.2):
        where = "the one it was just given" if best == 1 else "one too far on"
        yield error(
            f"{shares[best]:.1%} of its first tokens are the text's, but {where}; "
            f"{shares[2]:.1%} are the next",
            fix="labels were not shifted with the inputs in training: train again",
        )


@check("estimate", "behavioural", "a training estimate that decoding does not confirm")
def estimate(subject: Subject) -> Iterator[Finding]:
    claim, real = subject.estimate, _probe(subject).best.first
    if claim is not None and claim > real + 0.25:
        yield warning(
            f"training says {claim:.1%} of first tokens are right, the files give {real:.1%} on "
            "the shipped prompts",
            fix="too good to be true: a leaking mask or the training rows themselves; or prompts "
            "unlike the data: fledge eval --prompts on held-out chats tells",
        )


@check("acceptance", "behavioural", "a draft that accepts nothing, whatever else is right")
def acceptance(subject: Subject) -> Iterator[Finding]:
    probe = _probe(subject)
    score, mended = probe.best, " (as mended above)" if probe.steps else ""
    text = f"{score}, {score.acceptance.rounds} rounds of {DEPTHS} drafted tokens{mended}"
    if score.first < 0.05:
        yield error(f"replay of the files: {text}", fix=_UNSEEN)
    else:
        yield note(f"replay of the files: {text}")
