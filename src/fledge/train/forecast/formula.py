"""Extrapolates a run's own curve: the formula behind `forecast.py`.

**What is extrapolated.** A length of `1 + c + c^2 + ... + c^K` is that of a draft whose K tokens
are each accepted with probability c. Its log-odds `x = ln(c / (1 - c))` grow steadily where lengths
and losses bend:

    x = level + slope * bent(ln S - ln S_now) + anneal * A,     bent(r) = (1 - e^(-BEND r)) / BEND

`S` is the sum of the learning rates so far as shares of the peak, so that steps in warm-up and
decay count accordingly; a step on rows that were seen in e earlier passes counts e^(-e / REPEATS)
of one on new rows. `A` is how far the rate has decayed from its peak: the immediate gain from
annealing.

**What is fitted.** Level and slope, locally: an observation has less weight the more e-folds of S
lie between it and now (SPAN), because early curves are S-shaped and tell little about later ones.
Held-out evaluations determine the level. Training windows, of which there are many, determine the
slope: their log-odds are over every slot instead of rounds, are LINK times as steep, and are higher
by an offset that is fitted, too. It is a linear regression with priors, in closed form.

**What is not fitted** is what shapes the future: BEND, ANNEAL, LINK and REPEATS. They cannot be
estimated from the beginning of one run; their values are what real runs had in common
(benchmarks/results/forecast.md, which also reports the errors of forecasts). The spread combines
the regression's own uncertainty with MISFIT, the share of a forecast gain by which runs deviate
from the formula.
"""

from typing import Any

import numpy as np

from fledge.train.forecast.curves import Course, Curve, Floats

BEND = 0.6  # the slope falls by e^-BEND with every e-fold of S, so future gains are bounded
ANNEAL = (0.25, 0.08)  # gain in log-odds from annealing the rate to zero: mean, spread
LINK = 1.35  # slope over training slots, relative to that over held-out rounds
REPEATS = 15.0  # passes after which rows are worth 1/e: Muennighoff et al., arXiv 2305.16264
SPAN = 0.3  # e-folds
MISFIT = 0.5
NOISE, TRAINING_NOISE = 0.04, 0.05  # of an evaluation on top of sampling noise; of a training bin
INDEPENDENT = 6.0  # maximum total weight of training bins, whose errors are correlated
BIN = 0.1  # e-folds
_SLOPE, _OFFSET = (0.75, 0.3), (0.3, 0.3)  # priors, in log-odds


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


def held_out(curve: Curve) -> tuple[Floats, Floats, Floats]:
    """(steps, log-odds, variance) of a run's evaluations."""
    steps, lengths, rounds = np.array(curve.measured, float).T
    rate = rate_of(lengths, curve.depths)
    # The variance of a geometric length over n rounds, in log-odds: 1 / (c n)
    return steps, log_odds(rate), NOISE**2 + 1 / (rate * rounds)


def means_by(place: Floats, *columns: Floats) -> Floats:
    """[column, place]: the averages of each column over entries with the same place."""
    means = [[column[place == value].mean() for column in columns] for value in np.unique(place)]
    return np.array(means).T


class Times:
    """Computes ln S and A at the steps of a course."""

    def __init__(self, course: Course) -> None:
        self._steps, rates = course.rates()
        passes = np.maximum(0.0, self._steps / course.epoch_steps - 1)
        effective = rates * np.exp(-passes / REPEATS)
        areas = (effective[1:] + effective[:-1]) / 2 * np.diff(self._steps)
        self._sums = np.concatenate([[0.0], areas.cumsum()])
        self._annealed = np.maximum.accumulate(rates) - rates

    def __call__(self, steps: Any) -> tuple[Floats, Floats]:
        summed = np.interp(steps, self._steps, self._sums)
        return np.log(np.maximum(summed, 1e-3)), np.interp(steps, self._steps, self._annealed)


class Fit:
    """Level, slope, anneal and offset at the current step, with their covariance."""

    def __init__(self, curve: Curve) -> None:
        times = Times(curve.course)
        self._now = float(times([curve.step])[0][0])
        steps, odds, variance = held_out(curve)
        held_out_times, held_out_annealed = times(steps)
        held_out_rows = self._rows(held_out_times, held_out_annealed, 0.0)
        held_out_precision = self._nearness(held_out_times) / variance
        bins, annealed, training = self._bins(curve, times)
        weights = self._nearness(bins)
        weights *= min(1.0, INDEPENDENT / weights.sum())
        self._solve(
            np.concatenate([held_out_rows, self._rows(bins, annealed, 1.0)]),
            np.concatenate([odds, training / LINK]),
            np.concatenate([held_out_precision, weights * (LINK / TRAINING_NOISE) ** 2]),
        )

    def rise(self, times: Floats) -> Floats:
        """Change of the log-odds from now to each ln S: linear before now, bent after it."""
        ahead = times - self._now
        change: Floats = self._values[1] * np.where(ahead > 0, bent(ahead), ahead)
        return change

    def _nearness(self, times: Floats) -> Floats:
        """Weights of observations by their distance from now."""
        nearness: Floats = np.exp(-0.5 * ((times - self._now) / SPAN) ** 2) + 1e-9
        return nearness

    def _rows(self, times: Floats, annealed: Floats, link: float) -> Floats:
        return np.stack(
            [np.ones_like(times), times - self._now, annealed, np.full_like(times, link)], 1
        )

    def _bins(self, curve: Curve, times: Times) -> tuple[Floats, Floats, Floats]:
        """(ln S, A, log-odds) of training windows, averaged over equal intervals of ln S, so that
        the result does not depend on how often a run is logged."""
        middles, taus = np.array(curve.windows, float).T
        at, annealed = times(middles)
        bins, bin_annealed, lengths = means_by(np.floor((self._now - at) / BIN), at, annealed, taus)
        return bins, bin_annealed, log_odds(rate_of(lengths, curve.trained_depths))

    def _solve(self, rows: Floats, observed: Floats, precision: Floats) -> None:
        """Linear regression with priors; that of the level is nearly flat."""
        mean, spread = np.array([(0.0, 3.0), _SLOPE, ANNEAL, _OFFSET]).T
        weighted = rows * precision[:, None]
        self._covariance = np.linalg.inv(rows.T @ weighted + np.diag(spread**-2))
        self._values = mean + self._covariance @ (weighted.T @ (observed - rows @ mean))
        self._values[1:3] = np.maximum(self._values[1:3], 0.0)  # training does not make it worse

    def odds(self, course: Course, steps: Any) -> tuple[Floats, Floats]:
        """(log-odds, variance) at these steps of a course, the run's own or a longer one."""
        times, annealed = Times(course)(steps)
        gain = bent(times - self._now)
        features = np.stack([np.ones_like(gain), gain, annealed, np.zeros_like(gain)], 1)
        spread = np.einsum("ni,ij,nj->n", features, self._covariance, features)
        return features @ self._values, spread + (MISFIT * self._values[1] * gain) ** 2
