"""Checks of rotary positions: with settings unlike training, acceptance falls with length."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from fledge.diagnosis.checks.base import Finding, Subject, check, error, warning, wrong_key
from fledge.diagnosis.foreign import DraftFiles
from fledge.draft.rotary import rope_parameters


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
    reasons = {
        "rope_type": "its scaling was dropped or changed",
        "partial_rotary_factor": "the share of rotated channels was dropped or changed",
    }
    why = next(
        (reasons[key] for key in reasons if draft.get(key) != target.get(key)), "another base"
    )
    evidence = f"{why}: {', '.join(differing)}"
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
