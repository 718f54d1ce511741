"""Checks of rotary positions: a draft that turns them as it did not learn to drifts with length."""

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
    """What a draft of this target should turn by; None when no draft can."""
    config = subject.target.draft_config
    return None if config is None else _plain(rope_parameters(config))


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    """Comparable: no empty keys, no spelling, no default written out."""
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
    flat, theirs = subject.view.flat, target_rope(subject)
    bases = {"rope_theta": flat.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        bases[f"{key}.rope_theta"] = (flat.get(key) or {}).get("rope_theta")
    given = {name: float(base) for name, base in bases.items() if base is not None}
    if len(set(given.values())) < 2:
        return
    listed = ", ".join(f"{name} {base:g}" for name, base in given.items())
    right = None if theirs is None else theirs["rope_theta"]
    sure = theirs is not None and right in given.values()
    rope = {**own_rope(subject), "rope_theta": right}
    yield error(
        f"{listed}: which one counts depends on the engine's version",
        fix=f"the target's is {right:g}: write it everywhere" if sure else "write one of them",
        repair=partial(take_rope, rope=rope) if sure else None,
    )


@check("rope", "static", "rotary base, scaling or partial rotation other than the target's",
       repairs=True)  # fmt: skip
def rope(subject: Subject) -> Iterator[Finding]:
    """Ours are always the target's. Others may have trained otherwise on purpose: `rope-measured`
    finds out."""
    own, theirs = own_rope(subject), target_rope(subject)
    if theirs is None or own == theirs:
        return
    differing = [
        f"{key} {own.get(key, 'absent')} instead of {theirs.get(key, 'absent')}"
        for key in sorted({*own, *theirs})
        if own.get(key) != theirs.get(key)
    ]
    words = {
        "rope_type": "its scaling was dropped or changed",
        "partial_rotary_factor": "the share of channels that turn was dropped or changed",
    }
    why = next((words[key] for key in words if own.get(key) != theirs.get(key)), "another base")
    evidence = f"{why}: {', '.join(differing)}"
    if subject.view.layout.name == "fledge":
        fix = "a draft of fledge turns as its target does: write the target's settings"
        yield error(evidence, fix, partial(take_rope, rope=theirs))
    else:
        yield warning(evidence, fix="write what it was trained with (rope-measured compares them)")


@check("max-position", "static", "a position limit below the target's", repairs=True)
def max_position(subject: Subject) -> Iterator[Finding]:
    own = subject.view.get("max_position_embeddings")
    theirs = getattr(subject.target.text, "max_position_embeddings", None)
    if theirs is not None and (own is None or own < theirs):
        evidence = (
            f"max_position_embeddings is {own}, the target's {theirs}: vLLM's older versions stop "
            "turning positions there, and acceptance collapses beyond"
        )
        yield wrong_key("max_position_embeddings", theirs, evidence, severity="warning")
