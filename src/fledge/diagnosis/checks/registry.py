"""All checks, in the order in which they run; docs/diagnose.md has a table made from this."""

from types import ModuleType
from typing import Any

from fledge.diagnosis.block_view import BlockView
from fledge.diagnosis.checks import (
    behaviour,
    block_decoding,
    blocks,
    numeric,
    positions,
    settings,
    surroundings,
    tensors,
    vocabulary,
)
from fledge.diagnosis.checks.base import Check, Subject
from fledge.diagnosis.checks.block_probe import BlockProbe
from fledge.diagnosis.checks.probe import Answering, Probe
from fledge.draft.base import DraftModel
from fledge.draft.block import BlockDraftModel

_MODULES = (tensors, vocabulary, settings, positions, surroundings, numeric, behaviour)

_BLOCK_MODULES = (blocks, block_decoding)
# Checks of chain drafts that apply to block drafts too.
_SHARED = (
    "names", "vocab-size", "draft-vocab-size", "d2t-missing", "d2t-type", "d2t-absolute",
    "d2t-range", "d2t-order", "t2d-mismatch", "end-token", "dtype", "not-finite", "constant",
    "random-weights", "rope-conflict", "rope", "max-position", "tokenizer", "target-quantised",
)  # fmt: skip


def _checks(modules: tuple[ModuleType, ...]) -> dict[str, Check]:
    values = [value for module in modules for value in vars(module).values()]
    return {check.id: check for check in values if isinstance(check, Check)}


_CHAINS, _BLOCKS = _checks(_MODULES), _checks(_BLOCK_MODULES)
CHECKS = _CHAINS | _BLOCKS


def checks_for(subject: Subject) -> list[Check]:
    """The checks that apply to this kind of draft."""
    if not isinstance(subject.view, BlockView):
        return list(_CHAINS.values())
    return [*(_CHAINS[name] for name in _SHARED), *_BLOCKS.values()]


def table() -> str:
    """A Markdown table: every check, what it needs, what it looks for, whether it can repair."""
    needs = {"static": "files, target's config", "numeric": "target's tables"}
    lines = ["| check | needs | looks for | `--fix` |", "|---|---|---|---|"]
    for check in CHECKS.values():
        need, fix = needs.get(check.level, "target"), "yes" if check.repairs else ""
        lines.append(f"| `{check.id}` | {need} | {check.looks_for} | {fix} |")
    return "\n".join(lines) + "\n"


def probe_for(subject: Subject, draft: DraftModel, answers: Answering) -> Any:
    """A `BlockProbe` for block drafts, else a `Probe`; each has its own type of readings."""
    if isinstance(draft, BlockDraftModel):
        return BlockProbe(subject, draft, answers)
    return Probe(subject, draft, answers)
