"""Where a run leads, by the course of runs that are known to their end.

What is still ahead of a draft hardly shows in its first fifth; a run of the same method on the same
target has been there. Its log-odds over ln S, less annealing, are a curve g (see `formula.py`).
This run's are that curve, moved:

    x(s) = g(s + shift) + offset        before now: fitted; after it: the forecast

The offset is measured: what is compared is the shape. The shift, in e-folds, is what other learning
rates or batches do to the pace: 0 where only seed and length differ; else the likeliest of a grid,
where a shift is 0 give or take SHIFT, and an offset 0 give or take OFFSET. What is recent counts
most: offsets by SPAN as in the formula, shapes by SHAPE. Between its evaluations g goes as the
known run's training did; after its end this run's formula goes on; annealing is added as this run's
schedule has it. A run that ended before where this one is says nothing.

**How much each is worth.** The variance of a known run is that of the shapes so far (how far apart
they lie), and of what is known to differ: its `misfit`, a share of the gain, for other settings;
MISFIT of what is beyond its end; the spread of ANNEAL where it annealed otherwise. The run's own
formula is one more voice, with its own variance. Weights are inverse variances; the interval is
that of the mixture, so that voices which disagree make it wide.
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

SHIFT, OFFSET = 0.3, 0.3  # e-folds, log-odds
SHAPE = 0.5  # e-folds back from now, of the shapes that are compared
OTHER_SETTINGS = MISFIT / 2  # half of what is not known without the known run
_SHIFTS = np.arange(-20, 21) * 0.05


@dataclass(frozen=True)
class Known:
    """A finished run of the same method."""

    name: str
    curve: Curve
    misfit: float = 0.0  # share of a gain by which runs with such other settings part


class _Trace:
    """A curve in log-odds over ln S, less annealing."""

    def __init__(self, curve: Curve) -> None:
        times = Times(curve.course)
        steps, odds, self.variance = held_out(curve)
        self.held, self.annealed = times(steps)
        self.odds = odds - ANNEAL[0] * self.annealed
        self.now, self.sunk = (float(one[0]) for one in times([curve.step]))
        middles, taus = np.array(curve.windows, float).T
        at, annealed = times(middles)
        # the same places in every run, and whole ones only: equal runs have equal bins
        place = np.floor(at / BIN)
        whole = (place + 1) * BIN <= self.now
        whole = whole if whole.any() else np.ones_like(whole)
        self.bins, sunk, lengths = means_by(place[whole], at[whole], annealed[whole], taus[whole])
        trained = log_odds(rate_of(lengths, curve.trained_depths))
        self.trained = trained / LINK - ANNEAL[0] * sunk


@dataclass(frozen=True)
class _Voice:
    """What a known run says, at several steps."""

    odds: Floats
    gain: Floats  # from now
    misfit: float
    variance: Floats  # without the misfit
    shift: Floats  # variance for want of a better shift: in the interval, in no weight


class _Guide:
    """A known run, moved to where this one is."""

    def __init__(self, known: Known, own: _Trace, fit: Fit) -> None:
        self.name, self._misfit, self._trace = known.name, known.misfit, _Trace(known.curve)
        self._own, self._fit, trace = own, fit, self._trace
        self._gap = trace.odds - np.interp(trace.held, trace.bins, trace.trained)
        self._shifts = _SHIFTS if known.misfit else np.zeros(1)
        moved = [self._compared(shift) for shift in self._shifts]
        self._offsets, self._apart, unlikely = np.array(moved).T
        self._best = int(unlikely.argmin())
        likely = np.exp(-0.5 * (unlikely - unlikely[self._best]))
        self._likely = likely / likely.sum()

    @property
    def leads(self) -> bool:
        """Whether it has been where this run is not yet."""
        return self._end(self._shifts[self._best]) > self._own.now

    def _end(self, shift: float) -> float:
        return float(self._trace.held[-1]) - shift

    def _beyond(self, times: Floats, shift: float) -> Floats:
        """What lies after the known run's end, by this run's formula."""
        end = np.array([self._end(shift)])
        return self._fit.rise(np.maximum(times, end)) - self._fit.rise(end)

    def _at(self, times: Floats, shift: float) -> Floats:
        trace, inside = self._trace, np.minimum(times + shift, self._trace.held[-1])
        odds: Floats = np.interp(inside, trace.bins, trace.trained)
        odds += np.interp(inside, trace.held, self._gap) + self._beyond(times, shift)
        return odds

    def _compared(self, shift: float) -> tuple[float, float, float]:
        """(offset, variance of what is left, how unlikely) of the shapes so far."""
        own, trace = self._own, self._trace
        held = own.odds - self._at(own.held, shift)
        offset = _mean(held, _near(own.held - own.now, SPAN) / own.variance)
        held_near, held_squares = _near(own.held - own.now, SHAPE), (held - offset) ** 2
        bins = own.bins + shift
        inside = (bins >= trace.bins[0]) & (bins <= trace.bins[-1])
        trained = own.trained - np.interp(bins, trace.bins, trace.trained)
        trained = trained - _mean(trained, _near(own.bins - own.now, SPAN) * inside)
        near = _near(own.bins - own.now, SHAPE)
        # what cannot be compared is as far apart as noise makes it: no shift wins by fleeing
        noises = np.where(inside, (LINK / TRAINING_NOISE * trained) ** 2, 1.0)
        unlikely = (held_near * held_squares / own.variance).sum()
        unlikely += (shift / SHIFT) ** 2 + (offset / OFFSET) ** 2
        unlikely += min(1.0, INDEPENDENT / (near.sum() + 1e-9)) * (near * noises).sum()
        near = near * inside
        squares = (held_near * held_squares).sum() + (near * trained**2).sum()
        # an offset of one evaluation fits anything: less than two points say nothing
        count = max(held_near.sum() + near.sum() - 1, 1e-6)
        return offset, (squares + NOISE**2) / count, unlikely

    def voice(self, course: Course, steps: Any) -> _Voice:
        """What it says at these steps of a course."""
        times, annealed = Times(course)(steps)
        here = np.array([self._own.now])
        moved = (
            np.stack([self._at(times, shift) for shift in self._shifts]) + self._offsets[:, None]
        )
        best, shift = moved[self._best], self._shifts[self._best]
        gain = best - self._at(here, shift) - self._offsets[self._best]
        there = np.interp(times + shift, self._trace.held, self._trace.annealed)
        before = np.interp(here + shift, self._trace.held, self._trace.annealed)
        otherwise = (annealed - self._own.sunk) - (there - before)
        variance = (
            self._apart[self._best]
            + (MISFIT * self._beyond(times, shift)) ** 2
            + (ANNEAL[1] * otherwise) ** 2
        )
        return _Voice(
            best + ANNEAL[0] * annealed, gain, self._misfit, variance,
            shift=self._likely @ (moved - best) ** 2,
        )  # fmt: skip


class Guided:
    """The run's own formula and known runs, together."""

    def __init__(self, curve: Curve, known: Sequence[Known]) -> None:
        self._fit, own = Fit(curve), _Trace(curve)
        guides = [_Guide(one, own, self._fit) for one in known]
        self._guides = [guide for guide in guides if guide.leads]

    def odds(self, course: Course, steps: Any) -> tuple[Floats, Floats]:
        """(log-odds, variance) at these steps of a course."""
        if not self._guides:
            return self._fit.odds(course, steps)
        middles, variances, weights = self._voices(course, steps)
        middle = (weights * middles).sum(0)
        # what is measured in the end is an evaluation, too
        return middle, (weights * (variances + (middles - middle) ** 2)).sum(0) + NOISE**2

    def shares(self, course: Course) -> list[tuple[str, float]]:
        """How much each known run says at the end; two may have one name."""
        if not self._guides:
            return []
        _, _, weights = self._voices(course, np.array([course.steps]))
        names = [guide.name for guide in self._guides]
        return list(zip(names, weights[1:, 0].tolist(), strict=True))

    def _voices(self, course: Course, steps: Any) -> tuple[Floats, Floats, Floats]:
        """(log-odds, variance, weight) [voice, step]: the formula, then the known runs."""
        formula, own = self._fit.odds(course, steps)
        voices = [guide.voice(course, steps) for guide in self._guides]
        # one gain for all: who forecasts little is not the surer for it
        gain = np.mean([voice.gain for voice in voices], axis=0)
        own = np.maximum(own, (MISFIT * gain) ** 2)
        apart = [voice.variance + (voice.misfit * gain) ** 2 for voice in voices]
        shifts = [one + voice.shift for one, voice in zip(apart, voices, strict=True)]
        weights = 1 / np.stack([own, *apart])
        middles = np.stack([formula, *(voice.odds for voice in voices)])
        return middles, np.stack([own, *shifts]), weights / weights.sum(0)


def _near(times: Floats, span: float) -> Floats:
    near: Floats = np.exp(-0.5 * (times / span) ** 2)
    return near


def _mean(values: Floats, weights: Floats) -> float:
    weights = weights + 1e-12  # nothing near: all the same
    return float((values * weights).sum() / weights.sum())
