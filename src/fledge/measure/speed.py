"""Whether a draft pays off: step times, the speed-up they predict, and the measured one.

Rounds are timed one by one and their *median* is used, so that a machine that is busy for a moment
does not distort it. On one that is busy all the time, a plain step may still take longer than a
whole round: the clock is then called disturbed, and no speed-up is reported.
"""

from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from fledge.decode.clock import RoundTime
from fledge.decode.speculative import Generation, Timing

DISTURBED = "the clock was disturbed: measure again"


@dataclass
class Stopwatch:
    """Times of several texts decoded in the same way."""

    # by text, without the first token, which comes from the prompt's pass
    tokens: list[int] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)  # by text
    each: list[RoundTime] = field(default_factory=list)  # all rounds of all texts

    def add(self, timing: Timing, text: Generation) -> None:
        self.tokens.append(len(text.token_ids) - 1)
        self.decode_s.append(timing.decode_s)
        self.each += timing.each

    @property
    def texts(self) -> int:
        return len(self.tokens)

    @property
    def rounds(self) -> int:
        return len(self.each)

    @property
    def tokens_per_round(self) -> float:
        return sum(self.tokens) / self.rounds

    @property
    def draft_s(self) -> float:
        return median(time.draft_s for time in self.each)

    @property
    def target_s(self) -> float:
        return median(time.target_s for time in self.each)

    @property
    def round_s(self) -> list[float]:
        return [time.seconds for time in self.each]

    @property
    def tokens_per_s(self) -> float:
        """The median over texts."""
        return median(count / s for count, s in zip(self.tokens, self.decode_s, strict=True))


@dataclass(frozen=True)
class Speed:
    """The times of the same texts decoded with and without a draft, one at a time.

    A round costs one draft and one verification and yields `acceptance length` tokens, each of
    which would have cost one plain step.
    """

    plain: Stopwatch
    live: Stopwatch

    @classmethod
    def of(cls, plain: Stopwatch, live: Stopwatch) -> "Speed | None":
        """Returns None when there was no round to time."""
        return cls(plain, live) if plain.rounds and live.rounds else None

    @property
    def texts(self) -> int:
        return self.live.texts

    @property
    def plain_step_s(self) -> float:
        return median(self.plain.round_s)

    @property
    def draft_s(self) -> float:
        """Per round, for all drafted tokens."""
        return self.live.draft_s

    @property
    def verify_s(self) -> float:
        """Per round, for the target over all of them and for dropping what was rejected."""
        return self.live.target_s

    @property
    def break_even(self) -> float:
        """The acceptance length below which a draft slows things down."""
        return (self.draft_s + self.verify_s) / self.plain_step_s

    def predicted(self, acceptance_length: float) -> float:
        return acceptance_length / self.break_even

    @property
    def gains(self) -> list[float]:
        """Per text: tokens per second with the draft over tokens per second without."""
        texts = zip(
            self.live.tokens, self.live.decode_s, self.plain.tokens, self.plain.decode_s,
            strict=True,
        )  # fmt: skip
        return [(live / live_s) / (plain / plain_s) for live, live_s, plain, plain_s in texts]

    @property
    def measured(self) -> float:
        return median(self.gains)

    @property
    def disturbed(self) -> bool:
        """Whether the times are implausible: a round includes a plain step, so it cannot be faster,
        and a text cannot gain more than the tokens per round."""
        return self.break_even < 1 or self.measured > self.live.tokens_per_round

    def to_json(self, acceptance_length: float) -> dict[str, Any]:
        times: dict[str, Any] = {
            "texts": self.texts,
            "rounds": self.live.rounds,
            "plain_steps": self.plain.rounds,
            "disturbed": self.disturbed,
            "plain_step_ms": 1e3 * self.plain_step_s,
            "draft_ms_per_round": 1e3 * self.draft_s,
            "verify_ms_per_round": 1e3 * self.verify_s,
            "plain_step_ms_quartiles": _in_ms(self.plain.round_s),
            "round_ms_quartiles": _in_ms(self.live.round_s),
        }
        gains: dict[str, Any] = {
            "break_even_acceptance_length": self.break_even,
            "predicted_speedup": self.predicted(acceptance_length),
            "predicted_speedup_live_sample": self.predicted(self.live.tokens_per_round),
            "measured_speedup_live_sample": self.measured,
            "measured_speedup_quartiles": list(quartiles(self.gains)),
            "plain_tokens_per_s": self.plain.tokens_per_s,
            "speculative_tokens_per_s": self.live.tokens_per_s,
        }
        return times | (dict.fromkeys(gains) if self.disturbed else gains)


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and third quartile, between which the middle half of the values lies."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def _in_ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in quartiles(seconds)]
