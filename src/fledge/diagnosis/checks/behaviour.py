"""Checks by decoding: how much a draft accepts, and whether another reading accepts more."""

from collections.abc import Iterator
from functools import partial

from fledge.diagnosis.checks.base import Finding, Repair, Subject, check, error, note, warning
from fledge.diagnosis.checks.positions import take_rope, target_rope
from fledge.diagnosis.checks.probe import DEPTHS, Probe, swapped_halves
from fledge.diagnosis.foreign import DraftFiles

_UNSEEN = (
    "what files do not show: labels or masks shifted, hidden states of another request, truncated "
    "answers, a leaking mask in training; `fledge data preview` shows what was supervised"
)


def _probe(subject: Subject) -> Probe:
    assert isinstance(subject.probe, Probe), "behavioral checks run with a probe"
    return subject.probe


def _measured(
    subject: Subject, name: str, written: str, better: str, fix: str, repair: Repair | None = None
) -> Iterator[Finding]:
    if step := _probe(subject).steps.get(name):
        _, before, _, after = step
        yield error(f"{written}: {before}; {better}: {after}", fix, repair)


@check("aux-shifted", "behavioural", "aux layers one too low or too high, by replay of both",
       repairs=True)  # fmt: skip
def aux_shifted(subject: Subject) -> Iterator[Finding]:
    if step := _probe(subject).steps.get("aux-shifted"):
        before, after = list(step[0].aux_layer_ids), list(step[2].aux_layer_ids)
        yield error(
            f"with the outputs of {before}: {step[1]}; of {after}: {step[3]}",
            f"it was trained on {after}: the trainer numbers layers differently than the file",
            lambda files: files.put_aux(after),
        )
    elif lean := _probe(subject).leaning("aux-shifted"):
        yield note(
            f"the outputs of {list(lean[0].aux_layer_ids)} accept more, but only by "
            f"{lean[1]:.1f} standard errors",
            fix="measure again with --prompts 32 --max-new-tokens 128",
        )


def _measured_flag(subject: Subject, name: str, flag: str) -> Iterator[Finding]:
    written = getattr(_probe(subject).as_written, flag)
    before, after = str(written).lower(), str(not written).lower()
    repair = partial(DraftFiles.put, key=flag, value=not written)
    return _measured(subject, name, f"{flag} {before}", after, f"{flag}: {after}", repair)


@check("norm-output", "behavioural", "norm_output set differently than in training",
       repairs=True)  # fmt: skip
def norm_output(subject: Subject) -> Iterator[Finding]:
    return _measured_flag(subject, "norm-output", "norm_output")


@check("norm-residual", "behavioural", "norm_before_residual set differently than in training",
       repairs=True)  # fmt: skip
def norm_residual(subject: Subject) -> Iterator[Finding]:
    return _measured_flag(subject, "norm-residual", "norm_before_residual")


@check("rope-measured", "behavioural", "rotary settings with which it accepts less than with the "
       "target's", repairs=True)  # fmt: skip
def rope_measured(subject: Subject) -> Iterator[Finding]:
    rope = target_rope(subject)
    repair = None if rope is None else partial(take_rope, rope=rope)
    written, fix = "with the file's rotary settings", "write the target's settings"
    return _measured(subject, "rope-measured", written, "with the target's", fix, repair)


@check("fc-swapped", "behavioural", "EAGLE-1: fc that reads [state; embedding], not the reverse",
       repairs=True)  # fmt: skip
def fc_swapped(subject: Subject) -> Iterator[Finding]:
    def repair(files: DraftFiles) -> None:
        files.put_tensor("fc.weight", swapped_halves(files.view.state["fc.weight"]))

    written, fix = "with fc over [embedding; state], as engines have it", "swap the halves of fc"
    return _measured(subject, "fc-swapped", written, "over [state; embedding]", fix, repair)


@check("capture-measured", "behavioural", "training on a last state from the other side of the "
       "final norm")  # fmt: skip
def capture_measured(subject: Subject) -> Iterator[Finding]:
    if subject.view.merges:
        written = "with the target's last hidden state, which engines capture after its final norm"
        fix = "it was trained on the last layer's own output: train on the state after the norm"
        return _measured(subject, "capture-measured", written, "with the one before it", fix)
    written = "with the last layer's state as engines capture it"
    fix = "it was trained on transformers' last hidden state: train on the layer's own output"
    return _measured(subject, "capture-measured", written, "after the final norm", fix)


@check("labels", "behavioural", "a draft that predicts the token before or after the one it should")
def labels(subject: Subject) -> Iterator[Finding]:
    shares = _probe(subject).matches_by_offset()
    best = max(shares, key=lambda offset: shares[offset])
    if best != 2 and shares[best] > max(0.3, shares[2] + 0.2):
        what = "the token it was just given" if best == 1 else "the token after the next"
        yield error(
            f"{shares[best]:.1%} of its first tokens are {what} in the text; "
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
            "unlike the data: run fledge eval --prompts on held-out chats",
        )


@check("acceptance", "behavioural", "a draft that accepts nothing, whatever else is right")
def accepts_nothing(subject: Subject) -> Iterator[Finding]:
    probe = _probe(subject)
    score, repaired = probe.best, " (as repaired above)" if probe.steps else ""
    rounds = f"{score.acceptance.rounds} rounds of {DEPTHS} drafted tokens{repaired}"
    evidence = f"replay of the files: {score}, {rounds}"
    yield error(evidence, fix=_UNSEEN) if score.first < 0.05 else note(evidence)
