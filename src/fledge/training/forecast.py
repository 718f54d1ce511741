"""Forecasts the length that a run will reach, from its own curve or from those of finished runs of
the same recipe. The interval is meant to cover 80 %; benchmarks/results/forecast.md reports the
errors of forecasts of real runs.

A length of `1 + c + c^2 + ... + c^K` is that of a draft whose K tokens are each accepted with
probability c. Its log-odds `x = ln(c / (1 - c))` grow steadily where lengths and losses bend:

    x = level + slope * bent(ln S - ln S_now) + anneal * A;   bent(r) = (1 - e^(-BEND r)) / BEND

`S` is the sum of the learning rates so far as shares of the peak, in which a step on rows that were
seen in e earlier passes counts e^(-e / REPEATS) of one on new rows. `A` is how far the rate has
decayed from its peak: the immediate gain from annealing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fledge.core.errors import BadInput
from fledge.data.vocab import DraftVocabulary
from fledge.training.curves import Course, Curve, Floats, Known, read_metrics
from fledge.training.drafts import VOCABULARY_NAME

STOP_BELOW = 1.0  # percent per hour
_HALF_WIDTH = 1.2816  # standard deviations to either side of the mean that cover 80 %
_LEAST_SHARE, _LEAST_RATE = 0.1, 0.2  # minimum to forecast anything from
_PIECES = 40  # intervals into which the rest of the run is divided
_MIN_GAIN = 0.5  # percent; smaller limits are not reported
_RECENT = 10  # number of training windows that are averaged

BEND = 0.6  # the slope falls by e^-BEND with every e-fold of S, so future gains are bounded
ANNEAL = 0.25, 0.08  # gain in log-odds from annealing the rate to zero: mean, spread
REPEATS = 15.0  # passes after which rows are worth 1/e: Muennighoff et al., arXiv 2305.16264
SPAN = 0.3  # e-folds
MISFIT = 0.5  # the share of a gain by which runs deviate from the formula
SEEDS = 0.15  # the share of a gain by which runs of one recipe deviate from each other
NOISE = 0.04  # of an evaluation, on top of sampling noise
_PRIORS = ((0.0, 3.0), (0.6, 0.3), ANNEAL)  # of level, slope and annealing, in log-odds

OddsAt = Callable[[Course, Any], tuple[Floats, Floats]]  # (log-odds, variance) at steps of a course


@dataclass(frozen=True)
class Estimate:
    length: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """Lengths in tokens per round on the run's held-out rows."""

    step: int
    steps: int
    measured: float  # the latest evaluation
    end: Estimate
    twice_data: Estimate  # twice the rows for as many passes
    twice_time: Estimate  # twice the steps over the same rows
    path: tuple[tuple[int, Estimate], ...]  # from here to the end
    hours: float  # remaining, or what a finished run took
    gain: float  # percent of the length in these hours: to the end, or if trained as long again
    gain_per_hour: float | None  # None: the time of steps was not logged
    stop_at: int | None  # step from which it gains less per hour; None: worth training to the end
    by: tuple[str, ...] = ()  # names of known runs; none: its own curve

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def by_whom(self) -> str:
        """Names the known runs that it is based on; empty if there are none."""
        return f"by the course of {', '.join(self.by)}" if self.by else ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "finished": self.finished}


def forecast(curve: Curve, *, known: Sequence[Known] = ()) -> Forecast:
    """Forecast a run from its curve so far; raises BadInput if that is too short."""
    _check_enough(curve)
    course, step, fit = curve.course, curve.step, Fit(curve)
    followed = Followed(curve, known, fit)
    odds_at = followed.odds if followed.names else fit.odds
    last = curve.measured[-1][1]
    steps = np.unique(np.linspace(step, course.steps, _PIECES + 1).round().astype(int))
    path = tuple(zip(steps.tolist(), _estimates(odds_at, curve, course, steps), strict=True))
    finished = step >= course.steps
    end = Estimate(last, last, last) if finished else path[-1][1]
    twice_data, twice_time = (
        _estimates(odds_at, curve, longer, np.array([longer.steps]))[0]
        for longer in (course.doubled(data=True), course.doubled(data=False))
    )
    step_hours = curve.seconds / 3600 / max(1, step)
    gain = _percent(end, twice_time) if finished else _percent(path[0][1], end)
    hours = step_hours * (course.steps - (0 if finished else step))
    stop_at = None
    for (begin, before), (until, after) in reversed([] if finished else list(pairwise(path))):
        if _percent(before, after) >= STOP_BELOW * step_hours * (until - begin):
            break
        stop_at = begin
    return Forecast(
        step=step, steps=course.steps, measured=last, end=end, twice_data=twice_data,
        twice_time=twice_time, path=() if finished else path, hours=hours, gain=gain,
        gain_per_hour=gain / hours if hours else None, stop_at=stop_at,
        by=tuple(followed.names),
    )  # fmt: skip


def _check_enough(curve: Curve) -> None:
    """Raise BadInput if the curve is too short, rather than hide that behind a wide interval."""
    missing = ""
    if not curve.measured or not curve.depths:
        missing = "no held-out evaluation after the first step"
    elif curve.step < max(_LEAST_SHARE * curve.course.steps, curve.course.warmup + 1):
        missing = f"step {curve.step:,} of {curve.course.steps:,}: a tenth of the run is needed"
    elif rate_of(np.array(last := curve.measured[-1][1]), curve.depths) < _LEAST_RATE:
        missing = f"a length of {last:.2f} is where curves still gather speed"
    if missing:
        fix = "wait, or evaluate more often (evaluation.every_steps)"
        raise BadInput(f"too early for a forecast: {missing}", fix=fix)


def _estimates(odds_at: OddsAt, curve: Curve, course: Course, steps: Any) -> list[Estimate]:
    """Lengths at these steps of a course, the run's own or a longer one."""
    middle, variance = odds_at(course, steps)
    odds = middle[:, None] + np.sqrt(variance)[:, None] * _HALF_WIDTH * np.array([0.0, -1.0, 1.0])
    lengths = length_of(1 / (1 + np.exp(-odds)), curve.depths)
    return [Estimate(*map(float, row)) for row in lengths]


def _percent(before: Estimate, after: Estimate) -> float:
    return _gain(after.length, before.length)


def _gain(after: float, before: float) -> float:
    return 100 * (after / before - 1) if before > 0 else 0.0


# --- formula --------------------------------------------------------------------------------------


def rate_of(length: Floats, depths: int) -> Floats:
    """The c with 1 + c + ... + c^depths = length, by bisection."""
    low, high = np.zeros_like(length), np.ones_like(length)
    for _ in range(48):
        middle = (low + high) / 2
        too_short = length_of(middle, depths) < length
        low, high = np.where(too_short, middle, low), np.where(too_short, high, middle)
    return np.clip((low + high) / 2, 1e-4, 1 - 1e-4)


def length_of(rate: Floats, depths: int) -> Floats:
    total: Floats = (rate[..., None] ** np.arange(depths + 1)).sum(-1)
    return total


def log_odds(rate: Floats) -> Floats:
    odds: Floats = np.log(rate / (1 - rate))
    return odds


def bent(ahead: Floats) -> Floats:
    """E-folds ahead, discounted by BEND."""
    discounted: Floats = (1 - np.exp(-BEND * np.maximum(ahead, 0.0))) / BEND
    return discounted


def summed_rates(course: Course, steps: Any) -> tuple[Floats, Floats]:
    """(ln S, A) at these steps of a course."""
    at, rates = course.rates()
    passes = np.maximum(0.0, at / course.epoch_steps - 1)
    effective = rates * np.exp(-passes / REPEATS)
    areas = (effective[1:] + effective[:-1]) / 2 * np.diff(at)
    summed = np.interp(steps, at, np.concatenate([[0.0], areas.cumsum()]))
    annealed = np.interp(steps, at, np.maximum.accumulate(rates) - rates)
    return np.log(np.maximum(summed, 1e-3)), annealed


def held_out(curve: Curve) -> tuple[Floats, Floats, Floats, Floats]:
    """(ln S, A, log-odds, variance) of a run's evaluations."""
    steps, lengths, rounds = np.array(curve.measured, float).T
    rate = rate_of(lengths, curve.depths)
    # The variance of a geometric length over n rounds, in log-odds: 1 / (c n)
    return *summed_rates(curve.course, steps), log_odds(rate), NOISE**2 + 1 / (rate * rounds)


class Fit:
    """Level, slope and annealing of a run's own curve at the current step: a linear regression over
    its held-out evaluations, with priors.

    The more e-folds of S lie between an evaluation and now (SPAN), the less it counts: early curves
    are S-shaped and tell little about later ones. BEND, ANNEAL and REPEATS shape the future and are
    what real runs had in common.
    """

    def __init__(self, curve: Curve) -> None:
        self.now = float(summed_rates(curve.course, curve.step)[0])
        at, annealed, odds, variance = held_out(curve)
        rows = np.stack([np.ones_like(at), at - self.now, annealed], 1)
        mean, spread = np.array(_PRIORS).T
        weighted = rows * (self.nearness(at) / variance)[:, None]
        self._covariance = np.linalg.inv(rows.T @ weighted + np.diag(spread**-2))
        self._values = mean + self._covariance @ (weighted.T @ (odds - rows @ mean))
        self._values[1:] = np.maximum(self._values[1:], 0.0)  # training does not make it worse

    def nearness(self, times: Floats) -> Floats:
        """Weights of observations by their distance from now."""
        nearness: Floats = np.exp(-0.5 * ((times - self.now) / SPAN) ** 2) + 1e-9
        return nearness

    def rise(self, times: Floats) -> Floats:
        """Change of the log-odds from now to each later ln S, without annealing."""
        change: Floats = self._values[1] * bent(times - self.now)
        return change

    def odds(self, course: Course, steps: Any) -> tuple[Floats, Floats]:
        """The spread combines the regression's own uncertainty with MISFIT."""
        times, annealed = summed_rates(course, steps)
        gain = bent(times - self.now)
        features = np.stack([np.ones_like(gain), gain, annealed], 1)
        spread = np.einsum("ni,ij,nj->n", features, self._covariance, features)
        return features @ self._values, spread + (MISFIT * self._values[1] * gain) ** 2


class Followed:
    """The curves of known runs that extend beyond the current step: their log-odds over ln S, less
    annealing, plus the offset at which this run has followed them. Beyond their end, the formula
    continues them."""

    def __init__(self, curve: Curve, known: Sequence[Known], fit: Fit) -> None:
        self._fit, self.names = fit, list[str]()
        self._curves: list[tuple[Floats, Floats]] = []  # (ln S, log-odds)
        times, annealed, odds, variance = held_out(curve)
        for run in known:
            known_times, known_annealed, known_odds, _ = held_out(run.curve)
            if known_times[-1] > fit.now:
                known_odds = known_odds - ANNEAL[0] * known_annealed
                apart = odds - ANNEAL[0] * annealed - np.interp(times, known_times, known_odds)
                offset = np.average(apart, weights=fit.nearness(times) / variance)
                self._curves.append((known_times, known_odds + offset))
                self.names.append(run.name)

    def odds(self, course: Course, steps: Any) -> tuple[Floats, Floats]:
        """The evaluation that a forecast is compared with is a measurement, too."""
        times, annealed = summed_rates(course, steps)
        middles, spreads = [], []
        for known_times, known_odds in self._curves:
            inside = np.interp(times, known_times, known_odds)
            gain = inside - np.interp(np.array([self._fit.now]), known_times, known_odds)
            beyond = self._fit.rise(np.maximum(times, known_times[-1]))
            beyond -= self._fit.rise(known_times[-1:])
            middles.append(inside + beyond)
            spreads.append((SEEDS * gain) ** 2 + (MISFIT * beyond) ** 2)
        middle = np.mean(middles, axis=0)
        variance = np.mean(spreads, axis=0) + np.var(middles, axis=0) + 2 * NOISE**2
        return middle + ANNEAL[0] * annealed, variance


# --- limits ---------------------------------------------------------------------------------------
# What limits a draft's length, as far as its run's files show. Each limit states what the length
# would gain if it alone were removed, and what to change. The gains do not add up.


class Limit(NamedTuple):
    name: str
    gain: float  # percent of the length, if the limit were removed
    says: str


def limits_of(run: Path, ahead: Forecast) -> list[Limit]:
    """The limits of a run that are large enough to report, largest first."""
    logged, measured = read_metrics(run)
    end = ahead.end.length
    data, time = (_gain(more.length, end) for more in (ahead.twice_data, ahead.twice_time))
    says = f"still learning: {data:+.1f} % from twice the data, {time:+.1f} % from twice the steps"
    limits = [Limit("training", max(data, time), says)]
    if measured:
        limits += _of_run(run, measured[-1]["evaluation"], logged)
    reported = [limit for limit in limits if limit.gain >= _MIN_GAIN]
    return sorted(reported, key=lambda limit: -limit.gain)


def _of_run(run: Path, last: dict[str, Any], logged: Sequence[dict[str, Any]]) -> Iterator[Limit]:
    """The limits that the latest evaluation, the log and the vocabulary show."""
    joint, conditional = last.get("joint", []), last.get("conditional", [])
    depths = len(joint)
    if joint and conditional:
        # Assume twice as many tokens, the additional ones as good as the last of these.
        added = joint[-1] * sum(conditional[-1] ** k for k in range(1, depths + 1))
        says = f"all {depths} drafted tokens are accepted in {joint[-1]:.0%} of the rounds"
        gain = _gain(1 + sum(joint) + added, 1 + sum(joint))
        yield Limit("depth", gain, f"{says}: train and draft more, up to twice as many")
    recent = [line["tau"] for line in logged[-_RECENT:] if line.get("tau")]
    charged = logged and sum(loss > 0 for loss in logged[-1].get("depth_loss", []))
    # Rows must have been seen twice, and both counts must cover the same depths; EAGLE-1 steps
    # measure only one token.
    if recent and any(line.get("epoch") for line in logged) and charged == depths:
        trained, unseen = float(np.mean(recent)), float(last.get("tau") or 0.0)
        says = f"from every slot {trained:.2f} on training rows, {unseen:.2f} on held-out ones"
        yield Limit("data", _gain(trained, unseen), f"{says}: more rows rather than more passes")
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
            yield Limit("vocabulary", _gain(whole, length), says)
