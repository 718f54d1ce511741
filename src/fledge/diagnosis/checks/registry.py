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

CHECKS: dict[str, Check] = {
    one.id: one for module in _MODULES for one in vars(module).values() if isinstance(one, Check)
}


def table() -> str:
    """Markdown: every check, what it needs, what it looks for, whether it can repair."""
    lines = ["| check | needs | looks for | `--fix` |", "|---|---|---|---|"]
    needs = {
        "static": "files, target's config",
        "numeric": "target's tables",
        "behavioural": "target",
    }
    for check in CHECKS.values():
        fix = "yes" if check.repairs else ""
        lines.append(f"| `{check.id}` | {needs[check.level]} | {check.looks_for} | {fix} |")
    return "\n".join(lines) + "\n"
