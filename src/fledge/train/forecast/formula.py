"""Where a run's own curve leads: the formula behind `forecast.py`.

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
how far off forecasts were). The spread is made of the regression's own uncertainty and of MISFIT,
the share of a forecast gain by which runs part from the formula.
"""

from typing import Any

import numpy as np

from fledge.train.forecast.curves import Course, Curve, Floats

BEND = 0.6  # the slope falls by e^-BEND with every e-fold of S: what is to come has an end
ANNEAL = (0.25, 0.08)  # log-odds that a rate of zero adds to a constant one: mean, spread
LINK = 1.35  # slope over training slots, for a slope of 1 over held-out rounds
REPEATS = 15.0  # passes after which rows are worth 1/e: Muennighoff et al., arXiv 2305.16264
SPAN = 0.3  # e-folds
MISFIT = 0.5
NOISE, TRAINING_NOISE = 0.04, 0.05  # of an evaluation beside that of its rounds; of a bin
INDEPENDENT = 6.0  # training bins count as so many at most: neighbors err together
BIN = 0.1  # e-folds
_SLOPE, _OFFSET = (0.75, 0.3), (0.3, 0.3)  # priors, in log-odds


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


def log_odds(rate: Floats) -> Floats:
    odds: Floats = np.log(rate / (1 - rate))
    return odds


def bent(ahead: Floats) -> Floats:
    """E-folds ahead, as far as they still count."""
    worth: Floats = (1 - np.exp(-BEND * np.maximum(ahead, 0.0))) / BEND
    return worth


def held_out(curve: Curve) -> tuple[Floats, Floats, Floats]:
    """(steps, log-odds, variance) of a run's evaluations."""
    steps, lengths, rounds = np.array(curve.measured, float).T
    rate = rate_of(lengths, curve.depths)
    # of a geometric length over n rounds, in log-odds: 1 / (c n)
    return steps, log_odds(rate), NOISE**2 + 1 / (rate * rounds)


def means_by(place: Floats, *columns: Floats) -> Floats:
    """[column, place]: averages over what lies in the same place."""
    means = [[column[place == one].mean() for column in columns] for one in np.unique(place)]
    return np.array(means).T


class Times:
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


class Fit:
    """Level, slope, anneal and offset with their covariance, as they are now."""

    def __init__(self, curve: Curve) -> None:
        times = Times(curve.course)
        self._now = float(times([curve.step])[0][0])
        steps, odds, variance = held_out(curve)
        held_times, held_annealed = times(steps)
        held = self._rows(held_times, held_annealed, 0.0)
        held_precision = self._near(held_times) / variance
        bins, annealed, training = self._bins(curve, times)
        near = self._near(bins)
        near *= min(1.0, INDEPENDENT / near.sum())
        self._solve(
            np.concatenate([held, self._rows(bins, annealed, 1.0)]),
            np.concatenate([odds, training / LINK]),
            np.concatenate([held_precision, near * (LINK / TRAINING_NOISE) ** 2]),
        )

    def rise(self, times: Floats) -> Floats:
        """Log-odds over ln S, from now: straight before it, bent after."""
        ahead = times - self._now
        risen: Floats = self._values[1] * np.where(ahead > 0, bent(ahead), ahead)
        return risen

    def _near(self, times: Floats) -> Floats:
        near: Floats = np.exp(-0.5 * ((times - self._now) / SPAN) ** 2) + 1e-9
        return near

    def _rows(self, times: Floats, annealed: Floats, link: float) -> Floats:
        return np.stack(
            [np.ones_like(times), times - self._now, annealed, np.full_like(times, link)], 1
        )

    def _bins(self, curve: Curve, times: Times) -> tuple[Floats, Floats, Floats]:
        """Training windows averaged over even pieces of ln S: however often a run is logged."""
        middles, taus = np.array(curve.windows, float).T
        at, annealed = times(middles)
        bins, sunk, lengths = means_by(np.floor((self._now - at) / BIN), at, annealed, taus)
        return bins, sunk, log_odds(rate_of(lengths, curve.trained_depths))

    def _solve(self, rows: Floats, seen: Floats, precision: Floats) -> None:
        """Linear regression with priors; the level has none to speak of."""
        mean, spread = np.array([(0.0, 3.0), _SLOPE, ANNEAL, _OFFSET]).T
        weighted = rows * precision[:, None]
        self._covariance = np.linalg.inv(rows.T @ weighted + np.diag(spread**-2))
        self._values = mean + self._covariance @ (weighted.T @ (seen - rows @ mean))
        self._values[1:3] = np.maximum(self._values[1:3], 0.0)  # more training takes nothing away

    def odds(self, course: Course, steps: Any) -> tuple[Floats, Floats]:
        """(log-odds, variance) at these steps of a course, the run's own or a longer one."""
        ahead, annealed = Times(course)(steps)
        gain = bent(ahead - self._now)
        features = np.stack([np.ones_like(gain), gain, annealed, np.zeros_like(gain)], 1)
        spread = np.einsum("ni,ij,nj->n", features, self._covariance, features)
        return features @ self._values, spread + (MISFIT * self._values[1] * gain) ** 2
