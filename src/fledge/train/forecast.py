"""The length that a run will reach, from its own curve.

**What is extrapolated.** A length of `1 + c + c^2 + ... + c^K` is that of a draft whose K tokens
each stand with probability c. Its log-odds `x = ln(c / (1 - c))` go on evenly where lengths and
losses bend:

    x = level + slope * bent(ln S - ln S_now) + anneal * A,     bent(r) = (1 - e^(-BEND r)) / BEND

`S` is the sum of the learning rates so far as shares of the peak, so that warm-up and decay count
for what they do; a step on rows that were seen in e earlier passes counts e^(-e / REPEATS) of a
fresh one. `A` is how far the rate has come down from its peak: what annealing adds at once.

**What is fitted.** Level and slope, locally: an observation counts less the more e-folds of S lie
between it and now (SPAN), because early curves are S-shaped and say little about late ones.
Held-out evaluations say where the run is. Training windows, of which there are many, say how steep
it is: their log-odds are over every slot instead of rounds, are LINK times as steep and lie higher
by an offset that is fitted, too. It is a linear regression with priors, in closed form.

**What is not fitted** is the future: BEND, ANNEAL, LINK and REPEATS. One run's beginning cannot
tell them; they are what real runs had in common (benchmarks/results/forecast.md, which also says
how far off forecasts were). The interval is meant to hold 80 %; it is made of the regression's own
uncertainty and of MISFIT, the share of a forecast gain by which runs part from the formula.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.text import counted
from fledge.train.curves import Course, Curve, Floats

BEND = 0.6  # the slope falls by e^-BEND with every e-fold of S: what is to come has an end
ANNEAL = (0.25, 0.08)  # log-odds that a rate of zero adds to a constant one: mean, spread
LINK = 1.35  # slope over training slots, for a slope of 1 over held-out rounds
REPEATS = 15.0  # passes after which rows are worth 1/e: Muennighoff et al., arXiv 2305.16264
SPAN = 0.3  # e-folds
MISFIT = 0.5
STOP_BELOW = 1.0  # percent an hour
_SLOPE, _OFFSET = (0.75, 0.3), (0.3, 0.3)  # priors, in log-odds
_NOISE, _TRAINING_NOISE = 0.04, 0.05  # of an evaluation beside that of its rounds; of a bin
_INDEPENDENT = 6.0  # training bins count as so many at most: neighbors err together
_BIN = 0.1  # e-folds
_INSIDE = 1.2816  # spreads to either side of the middle that hold 80 %
_FEWEST_WINDOWS, _LEAST_SHARE, _LEAST_RATE = 6, 0.1, 0.2  # to forecast anything from
_PIECES = 40  # of the way to the end


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
    hours: float  # left, or what a finished run took
    gain: float  # percent of the length that they bring: to the end, or by as long again
    gain_per_hour: float | None  # None: how long steps take was not logged
    stop_below: float
    stop_at: int | None  # from there on it gains less; None: worth it to the end

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def line(self) -> str:
        """What is said beside an evaluation."""
        end, more = self.end, self.twice_data.length
        at_end = f"{end.length:.2f} at step {self.steps:,} ({end.low:.2f} to {end.high:.2f})"
        if self.finished:
            at_end = "the run is over"
        return f"forecast: {at_end}; {more:.2f} with twice the data"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "finished": self.finished}


def forecast(curve: Curve, *, stop_below: float = STOP_BELOW) -> Forecast:
    """What is to come; BadInput where too little is known."""
    _check_enough(curve)
    course, step = curve.course, curve.step
    fit = _Fit(curve)
    last = curve.measured[-1][1]
    steps = np.unique(np.linspace(step, course.steps, _PIECES + 1).round().astype(int))
    path = tuple(zip(steps.tolist(), fit.at(course, steps), strict=True))
    over = step >= course.steps
    end = Estimate(last, last, last) if over else path[-1][1]
    twice_data, twice_time = (
        fit.at(longer, np.array([longer.steps]))[0]
        for longer in (course.doubled(data=True), course.doubled(data=False))
    )
    step_hours = curve.seconds / 3600 / max(1, step)
    before, after = (end, twice_time) if over else (path[0][1], end)
    gain, hours = _percent(before, after), step_hours * (course.steps - (0 if over else step))
    return Forecast(
        step=step,
        steps=course.steps,
        measured=last,
        end=end,
        twice_data=twice_data,
        twice_time=twice_time,
        path=() if over else path,
        hours=hours,
        gain=gain,
        gain_per_hour=gain / hours if hours else None,
        stop_below=stop_below,
        stop_at=None if over else _stop_at(path, step_hours, stop_below),
    )


def rate_of(length: Floats, depths: int) -> Floats:
    """The c of a length: 1 + c + ... + c^depths, solved by halving."""
    low, high = np.zeros_like(length), np.ones_like(length)
    for _ in range(48):
        middle = (low + high) / 2
        short = length_of(middle, depths) < length
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.clip((low + high) / 2, 1e-4, 1 - 1e-4)


def length_of(rate: Floats, depths: int) -> Floats:
    total: Floats = (rate[..., None] ** np.arange(depths + 1)).sum(-1)
    return total


def _check_enough(curve: Curve) -> None:
    """Too little to go by is said, not hidden behind a wide interval."""
    missing = ""
    if not curve.measured or not curve.depths:
        missing = "no held-out evaluation after the first step"
    elif curve.step < max(_LEAST_SHARE * curve.course.steps, curve.course.warmup + 1):
        missing = f"step {curve.step:,} of {curve.course.steps:,}: a tenth of the run is needed"
    elif _last_rate(curve) < _LEAST_RATE:
        missing = f"a length of {curve.measured[-1][1]:.2f} is where curves still gather speed"
    elif len(curve.windows) < _FEWEST_WINDOWS:
        found = counted(len(curve.windows), "line of metrics", "lines of metrics")
        missing = f"{found}, {_FEWEST_WINDOWS} are needed"
    if missing:
        fix = "wait, or evaluate and log more often (evaluation.every_steps, tracking.every_steps)"
        raise BadInput(f"too early for a forecast: {missing}", fix=fix)


def _last_rate(curve: Curve) -> float:
    return float(rate_of(np.array([curve.measured[-1][1]]), curve.depths)[0])


def _log_odds(rate: Floats) -> Floats:
    odds: Floats = np.log(rate / (1 - rate))
    return odds


class _Times:
    """ln S and A of a course's steps."""

    def __init__(self, course: Course) -> None:
        self._steps, rates = course.rates()
        passes = np.maximum(0.0, self._steps / course.epoch_steps - 1)
        worth = rates * np.exp(-passes / REPEATS)
        pieces = (worth[1:] + worth[:-1]) / 2 * np.diff(self._steps)
        self._sums = np.concatenate([[0.0], pieces.cumsum()])
        self._annealed = np.maximum.accumulate(rates) - rates

    def __call__(self, steps: Any) -> tuple[Floats, Floats]:
        summed = np.interp(steps, self._steps, self._sums)
        return np.log(np.maximum(summed, 1e-3)), np.interp(steps, self._steps, self._annealed)


class _Fit:
    """Level, slope, anneal and offset with their covariance, as they are now."""

    def __init__(self, curve: Curve) -> None:
        self._depths, times = curve.depths, _Times(curve.course)
        self._now = float(times([curve.step])[0][0])
        steps, lengths, rounds = np.array(curve.measured, float).T
        held_times, held_annealed = times(steps)
        rate = rate_of(lengths, curve.depths)
        # of a geometric length over n rounds, in log-odds: 1 / (c n)
        variance = _NOISE**2 + 1 / (rate * rounds)
        held = self._rows(held_times, held_annealed, 0.0)
        held_precision = self._near(held_times) / variance
        bins, annealed, training = self._bins(curve, times)
        near = self._near(bins)
        near *= min(1.0, _INDEPENDENT / near.sum())
        self._solve(
            np.concatenate([held, self._rows(bins, annealed, 1.0)]),
            np.concatenate([_log_odds(rate), training / LINK]),
            np.concatenate([held_precision, near * (LINK / _TRAINING_NOISE) ** 2]),
        )

    def _near(self, times: Floats) -> Floats:
        near: Floats = np.exp(-0.5 * ((times - self._now) / SPAN) ** 2) + 1e-9
        return near

    def _rows(self, times: Floats, annealed: Floats, link: float) -> Floats:
        return np.stack(
            [np.ones_like(times), times - self._now, annealed, np.full_like(times, link)], 1
        )

    def _bins(self, curve: Curve, times: _Times) -> tuple[Floats, Floats, Floats]:
        """Training windows averaged over even pieces of ln S: however often a run is logged."""
        middles, taus = np.array(curve.windows, float).T
        at, annealed = times(middles)
        place = np.floor((self._now - at) / _BIN).astype(int)
        means = [
            [column[place == one].mean() for column in (at, annealed, taus)]
            for one in np.unique(place)
        ]
        bins, sunk, lengths = np.array(means).T
        return bins, sunk, _log_odds(rate_of(lengths, curve.trained_depths))

    def _solve(self, rows: Floats, seen: Floats, precision: Floats) -> None:
        """Linear regression with priors; the level has none to speak of."""
        mean, spread = np.array([(0.0, 3.0), _SLOPE, ANNEAL, _OFFSET]).T
        weighted = rows * precision[:, None]
        self._covariance = np.linalg.inv(rows.T @ weighted + np.diag(spread**-2))
        self._values = mean + self._covariance @ (weighted.T @ (seen - rows @ mean))
        self._values[1:3] = np.maximum(self._values[1:3], 0.0)  # more training takes nothing away

    def at(self, course: Course, steps: Any) -> list[Estimate]:
        """Lengths at these steps of a course, the run's own or a longer one."""
        ahead, annealed = _Times(course)(steps)
        ahead = ahead - self._now
        bent = (1 - np.exp(-BEND * np.maximum(ahead, 0.0))) / BEND
        features = np.stack([np.ones_like(bent), bent, annealed, np.zeros_like(bent)], 1)
        middle = features @ self._values
        spread = np.einsum("ni,ij,nj->n", features, self._covariance, features)
        spread = np.sqrt(spread + (MISFIT * self._values[1] * bent) ** 2)
        odds = middle[:, None] + spread[:, None] * _INSIDE * np.array([0.0, -1.0, 1.0])
        lengths = length_of(1 / (1 + np.exp(-odds)), self._depths)
        return [Estimate(*map(float, row)) for row in lengths]


def _percent(before: Estimate, after: Estimate) -> float:
    return 100 * (after.length / before.length - 1)


def _stop_at(path: tuple[tuple[int, Estimate], ...], step_hours: float, least: float) -> int | None:
    """The first step from which every piece of the rest gains less than `least` percent an hour."""
    stop = None
    for (begin, here), (end, there) in reversed(list(pairwise(path))):
        if _percent(here, there) >= least * step_hours * (end - begin):
            break
        stop = begin
    return stop
