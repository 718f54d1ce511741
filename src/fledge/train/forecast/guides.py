"""Forecasts a run from the curves of finished ("known") runs.

The first fifth of a run hardly shows what is still ahead of it, but a finished run of the same
method on the same target does. Its log-odds over ln S, less annealing, are a curve g (see
`formula.py`). This run is modeled as that curve, moved:

    x(s) = g(s + shift) + offset        before now: fitted; after it: the forecast

The offset is measured, so that only shapes are compared. The shift, in e-folds, is the effect of
other learning rates or batch sizes on the pace: 0 if only seed and length differ; otherwise the
most likely one of a grid, with priors of 0 +- SHIFT for the shift and 0 +- OFFSET for the offset.
Recent observations have the most weight: by SPAN for offsets, as in the formula, and by SHAPE for
shapes. Between its evaluations, g follows the known run's training windows; beyond its end, this
run's formula continues it; annealing is added according to this run's schedule. A known run that
ended before the current point of this one is not used.

**Weights.** The variance of a known run combines the distance of the shapes so far with what is
known to differ: its `misfit`, a share of the gain, for other settings; MISFIT of the part beyond
its end; the spread of ANNEAL where it annealed differently. The run's own formula is one more
source ("voice") with its own variance. Weights are inverse variances; the interval is that of the
mixture, so that disagreement between the voices widens it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fledge.train.forecast.curves import Course, Curve, Floats
from fledge.train.forecast.formula import (
    ANNEAL,
    BIN,
    INDEPENDENT,
    LINK,
    MISFIT,
    NOISE,
    SPAN,
    TRAINING_NOISE,
    Fit,
    Times,
    held_out,
    log_odds,
    means_by,
    rate_of,
)  # fmt: skip

SHIFT, OFFSET = 0.3, 0.3  # spreads of their priors: e-folds, log-odds
SHAPE = 0.5  # e-folds: how far back from now shapes are compared
OTHER_SETTINGS = MISFIT / 2  # half the misfit of a forecast without known runs
_SHIFTS = np.arange(-20, 21) * 0.05


@dataclass(frozen=True)
class Known:
    """A finished run of the same method."""

    name: str
    curve: Curve
    misfit: float = 0.0  # share of a gain by which runs with its settings may deviate


class _Trace:
    """A curve as log-odds over ln S, less annealing."""

    def __init__(self, curve: Curve) -> None:
        times = Times(curve.course)
        steps, odds, self.variance = held_out(curve)
        self.held, self.annealed = times(steps)  # at the held-out evaluations
        self.odds = odds - ANNEAL[0] * self.annealed
        self.now, self.sunk = (float(values[0]) for values in times([curve.step]))
        middles, taus = np.array(curve.windows, float).T
        at, annealed = times(middles)
        # Bins lie on a fixed grid, and only full ones are used, so that equal runs have equal bins.
        place = np.floor(at / BIN)
        full = (place + 1) * BIN <= self.now
        full = full if full.any() else np.ones_like(full)
        self.bins, bin_annealed, lengths = means_by(
            place[full], at[full], annealed[full], taus[full]
        )
        trained = log_odds(rate_of(lengths, curve.trained_depths))
        self.trained = trained / LINK - ANNEAL[0] * bin_annealed


@dataclass(frozen=True)
class _Voice:
    """The forecast of a known run at several steps."""

    odds: Floats
    gain: Floats  # from now
    misfit: float
    variance: Floats  # without the misfit
    shift: Floats  # variance from the uncertain shift; part of the interval, not of the weights


class _Guide:
    """A known run, shifted and offset to match this one."""

    def __init__(self, known: Known, current: _Trace, fit: Fit) -> None:
        self.name, self._misfit, self._trace = known.name, known.misfit, _Trace(known.curve)
        self._current, self._fit, trace = current, fit, self._trace
        self._gap = trace.odds - np.interp(trace.held, trace.bins, trace.trained)
        self._shifts = _SHIFTS if known.misfit else np.zeros(1)
        comparisons = [self._compare(shift) for shift in self._shifts]
        self._offsets, self._shape_variance, deviance = np.array(comparisons).T
        self._best = int(deviance.argmin())
        likelihood = np.exp(-0.5 * (deviance - deviance[self._best]))
        self._likelihood = likelihood / likelihood.sum()

    @property
    def leads(self) -> bool:
        """Whether it extends beyond the current point of this run."""
        return self._end(self._shifts[self._best]) > self._current.now

    def _end(self, shift: float) -> float:
        return float(self._trace.held[-1]) - shift

    def _beyond(self, times: Floats, shift: float) -> Floats:
        """The change in log-odds after the known run's end, by this run's formula."""
        end = np.array([self._end(shift)])
        return self._fit.rise(np.maximum(times, end)) - self._fit.rise(end)

    def _at(self, times: Floats, shift: float) -> Floats:
        trace, inside = self._trace, np.minimum(times + shift, self._trace.held[-1])
        odds: Floats = np.interp(inside, trace.bins, trace.trained)
        odds += np.interp(inside, trace.held, self._gap) + self._beyond(times, shift)
        return odds

    def _compare(self, shift: float) -> tuple[float, float, float]:
        """(offset, residual variance, deviance) of the shapes so far; the deviance is -2 ln of the
        shift's likelihood."""
        current, trace = self._current, self._trace
        residuals = current.odds - self._at(current.held, shift)
        offset = _mean(residuals, _nearness(current.held - current.now, SPAN) / current.variance)
        held_weights, held_squares = (
            _nearness(current.held - current.now, SHAPE),
            (residuals - offset) ** 2,
        )
        bins = current.bins + shift
        inside = (bins >= trace.bins[0]) & (bins <= trace.bins[-1])
        trained = current.trained - np.interp(bins, trace.bins, trace.trained)
        trained = trained - _mean(trained, _nearness(current.bins - current.now, SPAN) * inside)
        weights = _nearness(current.bins - current.now, SHAPE)
        # Bins without a counterpart count as typical noise, so that no shift wins by avoiding them.
        noises = np.where(inside, (LINK / TRAINING_NOISE * trained) ** 2, 1.0)
        deviance = (held_weights * held_squares / current.variance).sum()
        deviance += (shift / SHIFT) ** 2 + (offset / OFFSET) ** 2
        deviance += min(1.0, INDEPENDENT / (weights.sum() + 1e-9)) * (weights * noises).sum()
        weights = weights * inside
        squares = (held_weights * held_squares).sum() + (weights * trained**2).sum()
        # One degree of freedom goes to the offset: fewer than two points carry no information.
        count = max(held_weights.sum() + weights.sum() - 1, 1e-6)
        return offset, (squares + NOISE**2) / count, deviance

    def voice(self, course: Course, steps: Any) -> _Voice:
        """Its forecast at these steps of a course."""
        times, annealed = Times(course)(steps)
        now = np.array([self._current.now])
        moved = (
            np.stack([self._at(times, shift) for shift in self._shifts]) + self._offsets[:, None]
        )
        best, shift = moved[self._best], self._shifts[self._best]
        gain = best - self._at(now, shift) - self._offsets[self._best]
        known_annealed = np.interp(times + shift, self._trace.held, self._trace.annealed)
        known_before = np.interp(now + shift, self._trace.held, self._trace.annealed)
        difference = (annealed - self._current.sunk) - (known_annealed - known_before)
        variance = (
            self._shape_variance[self._best]
            + (MISFIT * self._beyond(times, shift)) ** 2
            + (ANNEAL[1] * difference) ** 2
        )
        return _Voice(
            best + ANNEAL[0] * annealed, gain, self._misfit, variance,
            shift=self._likelihood @ (moved - best) ** 2,
        )  # fmt: skip


class Guided:
    """The forecast that combines the run's own formula with known runs."""

    def __init__(self, curve: Curve, known: Sequence[Known]) -> None:
        self._fit, current = Fit(curve), _Trace(curve)
        guides = [_Guide(run, current, self._fit) for run in known]
        self._guides = [guide for guide in guides if guide.leads]

    def odds(self, course: Course, steps: Any) -> tuple[Floats, Floats]:
        """(log-odds, variance) at these steps of a course."""
        if not self._guides:
            return self._fit.odds(course, steps)
        middles, variances, weights = self._voices(course, steps)
        middle = (weights * middles).sum(0)
        # NOISE: the final length is itself measured by an evaluation.
        return middle, (weights * (variances + (middles - middle) ** 2)).sum(0) + NOISE**2

    def shares(self, course: Course) -> list[tuple[str, float]]:
        """(name, weight) of each known run at the end; a list, because names may repeat."""
        if not self._guides:
            return []
        _, _, weights = self._voices(course, np.array([course.steps]))
        names = [guide.name for guide in self._guides]
        return list(zip(names, weights[1:, 0].tolist(), strict=True))

    def _voices(self, course: Course, steps: Any) -> tuple[Floats, Floats, Floats]:
        """(log-odds, variance, weight) [voice, step]: the formula, then the known runs."""
        formula, formula_variance = self._fit.odds(course, steps)
        voices = [guide.voice(course, steps) for guide in self._guides]
        # The same gain for all: a voice that forecasts a small gain is not more certain for it.
        gain = np.mean([voice.gain for voice in voices], axis=0)
        formula_variance = np.maximum(formula_variance, (MISFIT * gain) ** 2)
        variances = [voice.variance + (voice.misfit * gain) ** 2 for voice in voices]
        with_shifts = [
            variance + voice.shift for variance, voice in zip(variances, voices, strict=True)
        ]
        weights = 1 / np.stack([formula_variance, *variances])
        middles = np.stack([formula, *(voice.odds for voice in voices)])
        return middles, np.stack([formula_variance, *with_shifts]), weights / weights.sum(0)


def _nearness(times: Floats, span: float) -> Floats:
    nearness: Floats = np.exp(-0.5 * (times / span) ** 2)
    return nearness


def _mean(values: Floats, weights: Floats) -> float:
    weights = weights + 1e-12  # if nothing is near, all values count equally
    return float((values * weights).sum() / weights.sum())
