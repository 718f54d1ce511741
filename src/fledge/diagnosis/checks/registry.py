"""All checks, in the order in which they run; the table in docs/diagnose.md is made from this."""

from fledge.diagnosis.checks import (
    behaviour,
    numeric,
    positions,
    settings,
    surroundings,
    tensors,
    vocabulary,
)
from fledge.diagnosis.checks.base import Check

_MODULES = (tensors, vocabulary, settings, positions, surroundings, numeric, behaviour)

_VALUES = [value for module in _MODULES for value in vars(module).values()]

CHECKS = {check.id: check for check in _VALUES if isinstance(check, Check)}


def table() -> str:
    """Markdown: every check, what it needs, what it looks for, whether it can repair."""
    needs = {"static": "files, target's config", "numeric": "target's tables"}
    lines = ["| check | needs | looks for | `--fix` |", "|---|---|---|---|"]
    for check in CHECKS.values():
        need, fix = needs.get(check.level, "target"), "yes" if check.repairs else ""
        lines.append(f"| `{check.id}` | {need} | {check.looks_for} | {fix} |")
    return "\n".join(lines) + "\n"
