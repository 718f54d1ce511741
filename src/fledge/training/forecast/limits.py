"""What limits a draft's length, as far as its run's files show, largest limit first.

Each limit states what the length would gain (in percent) if it alone were removed, and what to
change. The gains do not add up: a draft with a full vocabulary may still be too shallow.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fledge.core.reading import ListOf, MapOf, Number, Table, Whole, read_json
from fledge.data.vocab import DraftVocabulary
from fledge.training.drafts import VOCABULARY_NAME
from fledge.training.forecast.curves import read_metrics
from fledge.training.forecast.forecast import Forecast, length_of, rate_of

_MIN_GAIN = 0.5  # percent; smaller limits are not reported
_RECENT = 10  # number of training windows that are averaged
_PARTS = MapOf(Table({"rounds": Whole(), "acceptance_length": Number(0)}))
_DRAFT = Table(
    optional={"acceptance_length": Number(0), "by_category": _PARTS, "by_context": _PARTS}
)
_EVALUATION = Table({"drafts": ListOf(_DRAFT, most=4096)})
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Limit:
    name: str
    gain: float  # percent of the length, if the limit were removed
    says: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def limits_of(run: Path, ahead: Forecast, *, evaluation: Path | None = None) -> list[Limit]:
    """The limits of a run that are large enough to report, largest first."""
    logged, measured = read_metrics(run)
    limits: list[Limit] = []
    if measured:
        last = measured[-1]["evaluation"]
        limits += [*_depth(last), *_deep_tokens(last), *_memorized(last, logged)]
        vocabulary = run / VOCABULARY_NAME
        if vocabulary.is_file():
            limits += _vocabulary(last, DraftVocabulary.load(vocabulary))
    limits += _training(ahead)
    if evaluation is not None and evaluation.is_file():
        limits += _kinds(evaluation)
    reported = [limit for limit in limits if limit.gain >= _MIN_GAIN]
    return sorted(reported, key=lambda limit: -limit.gain)


def _percent(after: float, before: float) -> float:
    return 100 * (after / before - 1) if before > 0 else 0.0


def _length(conditional: Sequence[float]) -> float:
    return 1.0 + float(np.cumprod(np.array(conditional, float)).sum())


def _shares(last: dict[str, Any], name: str) -> list[float]:
    """Rates by depth, clipped to [0, 1]: the file may come from anywhere and hold anything."""
    shares: list[float] = np.clip(np.nan_to_num(np.array(last.get(name, []), float)), 0, 1).tolist()
    return shares


def _depth(last: dict[str, Any]) -> list[Limit]:
    """Rounds that end because all drafted tokens were accepted."""
    joint, conditional = _shares(last, "joint"), _shares(last, "conditional")
    if not joint or not conditional:
        return []
    # Assume twice as many tokens, the additional ones as good as the last of these.
    added = joint[-1] * sum(conditional[-1] ** k for k in range(1, len(joint) + 1))
    gain = _percent(1 + sum(joint) + added, 1 + sum(joint))
    says = f"all {len(joint)} drafted tokens are accepted in {joint[-1]:.0%} of the rounds"
    return [Limit("depth", gain, f"{says}: train and draft more, up to twice as many")]


def _deep_tokens(last: dict[str, Any]) -> list[Limit]:
    """Later tokens that are worse than the first one, given that those before were accepted."""
    conditional = _shares(last, "conditional")
    if len(conditional) < 2:
        return []
    improved = [max(rate, conditional[0]) for rate in conditional]
    worst = min(range(1, len(conditional)), key=lambda k: conditional[k])
    says = (
        f"token {worst + 1} is accepted in {conditional[worst]:.0%} of the rounds that reach it, "
        f"the first in {conditional[0]:.0%}: later tokens are learned less well; train longer, "
        "with more layers or another method"
    )
    return [Limit("deep tokens", _percent(_length(improved), _length(conditional)), says)]


def _memorized(last: dict[str, Any], logged: Sequence[dict[str, Any]]) -> list[Limit]:
    """Tau on training rows against tau on held-out rows, once rows were seen twice."""
    recent = [line["tau"] for line in logged[-_RECENT:] if line.get("tau")]
    repeated = any(line.get("epoch") for line in logged)
    charged = logged and sum(loss > 0 for loss in logged[-1].get("depth_loss", []))
    # The counts must cover the same depths; EAGLE-1 steps measure only one token.
    if not recent or not repeated or charged != len(last.get("joint", [])):
        return []
    trained, unseen = float(np.mean(recent)), float(last.get("tau") or 0.0)
    says = f"from every slot {trained:.2f} on training rows, {unseen:.2f} on held-out ones"
    return [Limit("data", _percent(trained, unseen), f"{says}: more rows rather than more passes")]


def _vocabulary(last: dict[str, Any], vocabulary: DraftVocabulary) -> list[Limit]:
    length, depths = last.get("acceptance_length", 0.0), len(last.get("joint", []))
    if vocabulary.coverage <= 0 or vocabulary.coverage >= 1 or not depths:
        return []
    rate = rate_of(np.array([length], float), depths)
    gain = _percent(
        float(length_of(np.minimum(rate / vocabulary.coverage, 1.0), depths)[0]), length
    )
    says = f"{1 - vocabulary.coverage:.2%} of the answers' tokens are outside the draft's"
    fix = f"{vocabulary.size:,}: a larger draft.draft_vocab_size"
    return [Limit("vocabulary", gain, f"{says} {fix}")]


def _training(ahead: Forecast) -> list[Limit]:
    now = ahead.end.length
    data, time = _percent(ahead.twice_data.length, now), _percent(ahead.twice_time.length, now)
    says = f"still learning: {data:+.1f} % from twice the data, {time:+.1f} % from twice the steps"
    return [Limit("training", max(data, time), says)]


def _kinds(evaluation: Path) -> list[Limit]:
    """The worst kind of prompt and the worst context length of `fledge eval`, compared with all."""
    figures = read_json(
        evaluation, _EVALUATION, what="the file of figures", max_bytes=_MOST_BYTES, finite=False
    )
    if not figures["drafts"]:
        return []
    draft = figures["drafts"][0]
    whole, kinds = draft.get("acceptance_length", 0.0), draft.get("by_category", {})
    contexts, longer = draft.get("by_context", {}), "longer rows (data.max_length)"
    return [
        *_worst("kind of prompt", kinds, whole, "more rows of that kind"),
        *_worst("context", contexts, whole, longer),
    ]


def _worst(name: str, parts: dict[str, Any], whole: float, fix: str) -> list[Limit]:
    """The overall gain if the rounds of the worst part were as long as the average."""
    total = sum(figures["rounds"] for figures in parts.values())
    if len(parts) < 2 or not total:
        return []
    worst = min(parts, key=lambda part: parts[part]["acceptance_length"])
    length = parts[worst]["acceptance_length"]
    if not 1 <= length <= whole:
        return []
    # The same tokens would then take fewer rounds.
    rounds = total - parts[worst]["rounds"] * (1 - length / whole)
    says = f"{length:.2f} on '{worst}', {whole:.2f} on all: {fix}"
    return [Limit(name, _percent(total, rounds), says)]
