"""What limits a draft's length, as far as its run's files show, largest limit first.

Each limit states what the length would gain (in percent) if it alone were removed, and what to
change. The gains do not add up: a draft with a full vocabulary may still be too shallow.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fledge.core.reading import ListOf, MapOf, Number, Table, Whole, read_json
from fledge.data.vocab import DraftVocabulary
from fledge.training.curves import read_metrics
from fledge.training.drafts import VOCABULARY_NAME
from fledge.training.forecast import Forecast, length_of, rate_of

_MIN_GAIN = 0.5  # percent; smaller limits are not reported
_RECENT = 10  # number of training windows that are averaged
_PARTS = MapOf(Table({"rounds": Whole(), "acceptance_length": Number(0)}))
_DRAFT = Table(
    optional={"acceptance_length": Number(0), "by_category": _PARTS, "by_context": _PARTS}
)
_EVALUATION = Table({"drafts": ListOf(_DRAFT, most=4096)})


class Limit(NamedTuple):
    name: str
    gain: float  # percent of the length, if the limit were removed
    says: str


def limits_of(run: Path, ahead: Forecast, *, evaluation: Path | None = None) -> list[Limit]:
    """The limits of a run that are large enough to report, largest first."""
    logged, measured = read_metrics(run)
    end = ahead.end.length
    data, time = (_percent(more.length, end) for more in (ahead.twice_data, ahead.twice_time))
    says = f"still learning: {data:+.1f} % from twice the data, {time:+.1f} % from twice the steps"
    limits = [Limit("training", max(data, time), says)]
    if measured:
        limits += _of_run(run, measured[-1]["evaluation"], logged)
    if evaluation is not None and evaluation.is_file():
        figures = read_json(evaluation, _EVALUATION, what="the file of figures")
        for draft in figures["drafts"][:1]:
            limits += _of_parts(draft)
    reported = [limit for limit in limits if limit.gain >= _MIN_GAIN]
    return sorted(reported, key=lambda limit: -limit.gain)


def _percent(after: float, before: float) -> float:
    return 100 * (after / before - 1) if before > 0 else 0.0


def _of_run(run: Path, last: dict[str, Any], logged: Sequence[dict[str, Any]]) -> Iterator[Limit]:
    """The limits that the latest evaluation, the log and the vocabulary show."""
    # rates by depth, clipped: the file may come from anywhere and hold anything
    joint, conditional = (
        np.clip(np.nan_to_num(np.array(last.get(name, []), float)), 0, 1).tolist()
        for name in ("joint", "conditional")
    )
    depths = len(joint)
    if joint and conditional:
        # Assume twice as many tokens, the additional ones as good as the last of these.
        added = joint[-1] * sum(conditional[-1] ** k for k in range(1, depths + 1))
        says = f"all {depths} drafted tokens are accepted in {joint[-1]:.0%} of the rounds"
        gain = _percent(1 + sum(joint) + added, 1 + sum(joint))
        yield Limit("depth", gain, f"{says}: train and draft more, up to twice as many")
    if len(conditional) > 1:
        now, improved = (
            1.0 + float(np.cumprod(rates).sum())
            for rates in (conditional, np.maximum(conditional, conditional[0]))
        )
        worst = min(range(1, len(conditional)), key=lambda k: conditional[k])
        says = (
            f"token {worst + 1} is accepted in {conditional[worst]:.0%} of the rounds that reach "
            f"it, the first in {conditional[0]:.0%}: later tokens are learned less well; train "
            "longer, with more layers or another method"
        )
        yield Limit("deep tokens", _percent(improved, now), says)
    recent = [line["tau"] for line in logged[-_RECENT:] if line.get("tau")]
    charged = logged and sum(loss > 0 for loss in logged[-1].get("depth_loss", []))
    # Rows must have been seen twice, and both counts must cover the same depths; EAGLE-1 steps
    # measure only one token.
    if recent and any(line.get("epoch") for line in logged) and charged == depths:
        trained, unseen = float(np.mean(recent)), float(last.get("tau") or 0.0)
        says = f"from every slot {trained:.2f} on training rows, {unseen:.2f} on held-out ones"
        yield Limit("data", _percent(trained, unseen), f"{says}: more rows rather than more passes")
    if depths and (run / VOCABULARY_NAME).is_file():
        vocabulary = DraftVocabulary.load(run / VOCABULARY_NAME)
        if 0 < vocabulary.coverage < 1:
            length = last.get("acceptance_length", 0.0)
            rate = rate_of(np.array([length], float), depths) / vocabulary.coverage
            says = (
                f"{1 - vocabulary.coverage:.2%} of the answers' tokens are outside the draft's "
                f"{vocabulary.size:,}: a larger draft.draft_vocab_size"
            )
            whole = float(length_of(np.minimum(rate, 1.0), depths)[0])
            yield Limit("vocabulary", _percent(whole, length), says)


def _of_parts(draft: dict[str, Any]) -> Iterator[Limit]:
    """The worst kind of prompt and the worst context length of `fledge eval`: the overall gain if
    its rounds were as long as the average."""
    whole = draft.get("acceptance_length", 0.0)
    for name, key, fix in (
        ("kind of prompt", "by_category", "more rows of that kind"),
        ("context", "by_context", "longer rows (data.max_length)"),
    ):
        parts = draft.get(key, {})
        total = sum(figures["rounds"] for figures in parts.values())
        worst = min(parts, key=lambda part: parts[part]["acceptance_length"], default="")
        length = parts[worst]["acceptance_length"] if worst else 0.0
        if len(parts) > 1 and total and 1 <= length <= whole:
            # The same tokens would then take fewer rounds.
            rounds = total - parts[worst]["rounds"] * (1 - length / whole)
            says = f"{length:.2f} on '{worst}', {whole:.2f} on all: {fix}"
            yield Limit(name, _percent(total, rounds), says)
