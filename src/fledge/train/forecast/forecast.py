"""Forecasts the length that a run will reach, from its own curve and from known runs.

Without known runs, `formula.py` extrapolates the run's own curve. Finished runs of the same method
show what was ahead of them at the same point: `guides.py` weighs them against the formula. The
interval is meant to cover 80 %; benchmarks/results/forecast.md reports the errors of forecasts of
real runs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.text import counted
from fledge.train.forecast.curves import Course, Curve
from fledge.train.forecast.formula import length_of, rate_of
from fledge.train.forecast.guides import Guided, Known

STOP_BELOW = 1.0  # percent per hour
_HALF_WIDTH = 1.2816  # standard deviations to either side of the mean that cover 80 %
FEWEST_WINDOWS, _LEAST_SHARE, _LEAST_RATE = 6, 0.1, 0.2  # minimum to forecast anything from
_PIECES = 40  # intervals into which the rest of the run is divided
_NAMED = 3  # maximum number of known runs named in a line
_WORTH_NAMING = 0.05  # minimum share of a known run in a forecast


@dataclass(frozen=True)
class Estimate:
    length: float
    low: float
    high: float


@dataclass(frozen=True)
class Voice:
    """A known run, and its share in a forecast; the rest is the run's own curve."""

    name: str
    share: float


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
    stop_below: float
    stop_at: int | None  # step from which it gains less per hour; None: worth training to the end
    by: tuple[Voice, ...] = ()  # known runs, largest share first

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def line(self) -> str:
        """The line that is shown next to an evaluation."""
        end, with_more_data = self.end, self.twice_data.length
        at_end = f"{end.length:.2f} at step {self.steps:,} ({end.low:.2f} to {end.high:.2f})"
        if self.finished:
            at_end = "the run is over"
        return f"forecast: {at_end}; {with_more_data:.2f} with twice the data{self.by_whom(', ')}"

    def by_whom(self, before: str = "") -> str:
        """Names the known runs that it is based on; empty if there are none."""
        names = [voice.name for voice in self.by]
        more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
        return f"{before}by the course of {', '.join(names[:_NAMED])}{more}" if names else ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "finished": self.finished}


def forecast(
    curve: Curve, *, known: Sequence[Known] = (), stop_below: float = STOP_BELOW
) -> Forecast:
    """Forecast a run from its curve so far; raises BadInput if that is too short."""
    _check_enough(curve)
    course, step = curve.course, curve.step
    fit = Guided(curve, known)
    last = curve.measured[-1][1]
    steps = np.unique(np.linspace(step, course.steps, _PIECES + 1).round().astype(int))
    path = tuple(zip(steps.tolist(), _estimates(fit, curve, course, steps), strict=True))
    finished = step >= course.steps
    end = Estimate(last, last, last) if finished else path[-1][1]
    twice_data, twice_time = (
        _estimates(fit, curve, longer, np.array([longer.steps]))[0]
        for longer in (course.doubled(data=True), course.doubled(data=False))
    )
    step_hours = curve.seconds / 3600 / max(1, step)
    before, after = (end, twice_time) if finished else (path[0][1], end)
    gain, hours = _percent(before, after), step_hours * (course.steps - (0 if finished else step))
    return Forecast(
        step=step,
        steps=course.steps,
        measured=last,
        end=end,
        twice_data=twice_data,
        twice_time=twice_time,
        path=() if finished else path,
        hours=hours,
        gain=gain,
        gain_per_hour=gain / hours if hours else None,
        stop_below=stop_below,
        stop_at=None if finished else _stop_at(path, step_hours, stop_below),
        by=_voices(fit, course),
    )


def _check_enough(curve: Curve) -> None:
    """Raise BadInput if the curve is too short, rather than hide that behind a wide interval."""
    missing = ""
    if not curve.measured or not curve.depths:
        missing = "no held-out evaluation after the first step"
    elif curve.step < max(_LEAST_SHARE * curve.course.steps, curve.course.warmup + 1):
        missing = f"step {curve.step:,} of {curve.course.steps:,}: a tenth of the run is needed"
    elif _last_rate(curve) < _LEAST_RATE:
        missing = f"a length of {curve.measured[-1][1]:.2f} is where curves still gather speed"
    elif len(curve.windows) < FEWEST_WINDOWS:
        lines = counted(len(curve.windows), "line of metrics", "lines of metrics")
        missing = f"{lines}, {FEWEST_WINDOWS} are needed"
    if missing:
        fix = "wait, or evaluate and log more often (evaluation.every_steps, tracking.every_steps)"
        raise BadInput(f"too early for a forecast: {missing}", fix=fix)


def _last_rate(curve: Curve) -> float:
    return float(rate_of(np.array([curve.measured[-1][1]]), curve.depths)[0])


def _estimates(fit: Guided, curve: Curve, course: Course, steps: Any) -> list[Estimate]:
    """Lengths at these steps of a course, the run's own or a longer one."""
    middle, variance = fit.odds(course, steps)
    odds = middle[:, None] + np.sqrt(variance)[:, None] * _HALF_WIDTH * np.array([0.0, -1.0, 1.0])
    lengths = length_of(1 / (1 + np.exp(-odds)), curve.depths)
    return [Estimate(*map(float, row)) for row in lengths]


def _voices(fit: Guided, course: Course) -> tuple[Voice, ...]:
    shares = fit.shares(course)
    voices = [Voice(name, share) for name, share in shares if share >= _WORTH_NAMING]
    return tuple(sorted(voices, key=lambda voice: -voice.share))


def _percent(before: Estimate, after: Estimate) -> float:
    return 100 * (after.length / before.length - 1)


def _stop_at(path: tuple[tuple[int, Estimate], ...], step_hours: float, least: float) -> int | None:
    """The first step from which no interval of the path gains `least` percent per hour."""
    stop = None
    for (begin, before), (end, after) in reversed(list(pairwise(path))):
        if _percent(before, after) >= least * step_hours * (end - begin):
            break
        stop = begin
    return stop
