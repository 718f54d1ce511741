"""Find out why a draft accepts too little: run all checks, repair what is certain, measure."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput, UntrustedCode
from fledge.core.files import atomic_directory, save_tensors, write_json
from fledge.formats.checks import settings, tensors, vocabulary
from fledge.formats.checks.base import Check, Finding, Subject, TargetFiles
from fledge.formats.checks.probe import Answering, Probe, Score
from fledge.formats.codec import RECORD_NAME
from fledge.formats.foreign import DraftFiles, read_files
from fledge.formats.import_draft import build_draft
from fledge.methods.shared.files import CONFIG_NAME, WEIGHTS_NAME
from fledge.models.weight_files import weight_files
from fledge.training.checkpoint import STATE_NAME, TRAINING_NAME
from fledge.training.runs import checkpoint_state

_ROUNDS = 6  # of repairing and checking again: one fault may hide another
# Checks that need only the draft's files and the target's config and tokenizer, by the names that
# findings have.
STATIC: dict[str, Check] = {
    "architecture": tensors.architecture,
    "names": tensors.names,
    "d2t": vocabulary.d2t,
    "sizes": settings.sizes,
    "flags": settings.flags,
    "mask-token": settings.mask_token,
    "rope": settings.rope,
    "max-position": settings.max_position,
    "aux-layers": settings.aux_layers,
    "serving": settings.serving,
}
# These also need the target's embedding and head.
NUMERIC: dict[str, Check] = {"embeddings": vocabulary.embeddings, "head": vocabulary.head}


@dataclass
class Diagnosis:
    """Everything that `fledge diagnose` reports."""

    files: DraftFiles
    target: str
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # which checks did not run, and why
    repaired: DraftFiles | None = None  # None when nothing was repaired
    score: Score | None = None  # of the files as they are, or as repaired before decoding
    repaired_score: Score | None = None  # after the repairs that decoding suggested

    @property
    def layout(self) -> str:
        return self.files.view.layout.name

    def of(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def healthy(self) -> bool:
        return not self.of("error") and not self.of("warning")

    def to_json(self) -> dict[str, Any]:
        acceptance, repaired = (
            None if score is None else score.acceptance.to_json()
            for score in (self.score, self.repaired_score)
        )
        return {
            "draft": str(self.files.directory),
            "target": self.target,
            "layout": self.layout,
            "healthy": self.healthy,
            "findings": [finding.to_json() for finding in self.findings],
            "skipped": self.skipped,
            "acceptance": acceptance,
            "repaired_acceptance": repaired,
        }


def diagnose(
    directory: Path,
    target: str,
    *,
    engine: str = "",
    static: bool = False,
    answering: Callable[[TargetFiles], Answering] = Answering,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """Check a draft of any trainer against its target.

    `static` skips what needs the target's weights. `engine` ("vllm", "sglang") turns what that
    engine cannot load into errors. `answering` loads the target and has it answer the prompts.
    """
    if engine not in ("", "vllm", "sglang"):
        raise BadInput(f"'{engine}' is not an engine", where="engine", fix="vllm or sglang")
    result = Diagnosis(read_files(directory), target)
    subject = Subject(result.files.copy(), TargetFiles(target, trust_remote_code), engine=engine)
    subject = repair_and_recheck(subject, STATIC if static else STATIC | NUMERIC, result)
    if not stuck_on(result):
        result.findings += run_checks(subject, {"network": tensors.network})
    if static:
        result.skipped.append("numeric and behavioral checks: --static reads no target weights")
    elif stuck := stuck_on(result):
        result.skipped.append(f"behavioral checks: {stuck[0].check} must be repaired first")
    else:
        _decode(subject, result, answering)
    return result


def run_checks(subject: Subject, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """All findings of these checks."""
    for name, check in checks.items():
        for finding in check(subject):
            yield replace(finding, check=name)
            if finding.last:
                return


def stuck_on(result: Diagnosis) -> list[Finding]:
    """The errors that have no certain repair."""
    return [finding for finding in result.of("error") if finding.repair is None]


def repair_and_recheck(subject: Subject, checks: Mapping[str, Check], result: Diagnosis) -> Subject:
    """Collect the findings of the files as they are, then what certain repairs uncover."""
    for number in range(_ROUNDS):
        known = {finding.evidence for finding in result.findings}
        new = [
            finding
            for finding in run_checks(subject, checks)
            if finding.evidence not in known  # and notes describe the original files only
            and (number == 0 or finding.severity != "note")
        ]
        result.findings += new
        if not _repair(subject, new, result):
            break
        subject = replace(subject)  # a new view of the changed files
    return subject


def _repair(subject: Subject, findings: Iterable[Finding], result: Diagnosis) -> int:
    """Apply the certain repairs among these findings; returns how many there were."""
    repairs = [finding.repair for finding in findings if finding.repair is not None]
    for repair in repairs:
        repair(subject.files)
        result.repaired = subject.files
    return len(repairs)


def _decode(
    subject: Subject, result: Diagnosis, answering: Callable[[TargetFiles], Answering]
) -> None:
    try:
        draft = build_draft(subject)
        answers = answering(subject.target)
    except UntrustedCode:
        raise
    except BadInput as refused:
        result.skipped.append(f"behavioral checks: {refused}")
        return
    probe = Probe(subject, draft, answers)
    findings = list(probe.findings(training_estimate(subject.directory)))
    result.findings += findings
    result.score = probe.score(probe.as_written)
    if _repair(subject, findings, result):
        result.repaired_score = probe.best


def training_estimate(directory: Path) -> float | None:
    """Share of correct first tokens in the run's last evaluation; None without a record."""
    state = checkpoint_state(directory) or {}
    rates = (state.get("last") or {}).get("prefix_acceptance") or []
    return float(rates[0]) if rates else None


def write_repaired(result: Diagnosis, out: Path) -> Path:
    """Write the draft with all certain repairs to `out`, with the other files beside it."""
    source = result.files.directory
    if result.repaired is None:
        raise BadInput("nothing that can be repaired with certainty", where=str(source))
    if out.exists():
        raise BadInput("exists already", where=str(out), fix="name a new directory")
    # rewritten, or about the old files: shard lists, checksums, optimizer state
    stale = {CONFIG_NAME, STATE_NAME, TRAINING_NAME, RECORD_NAME}
    stale |= {path.name for path in (*weight_files(source), *source.glob("*.index.json"))}
    with atomic_directory(out) as temporary:
        for entry in sorted(source.iterdir()):
            if entry.is_file() and entry.name not in stale:
                shutil.copyfile(entry, temporary / entry.name)
        write_json(temporary / CONFIG_NAME, result.repaired.config)
        tensors = result.repaired.tensors.items()
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors}
        save_tensors(temporary / WEIGHTS_NAME, copies, {"format": "pt"})
    return out
