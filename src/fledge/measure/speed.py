"""Whether a draft pays off: step times, the speed-up they predict, and the measured one.

Rounds are timed one by one and their *median* is used, so that a machine that is busy for a moment
does not distort it. On one that is busy all the time, a plain step may still take longer than a
whole round: the clock is then called disturbed, and no speed-up is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, quantiles
from typing import Any

from fledge.decode.recorded import RoundTime
from fledge.decode.rounds import drafted_depths
from fledge.decode.speculative import Generation, SpeculativeDecoder, Timing
from fledge.decode.stops import Pieces, Stops, eos_token_ids
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel

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
        return median(time.draft_s for time in self.live.each)

    @property
    def verify_s(self) -> float:
        """Per round, for the target over all of them and for dropping what was rejected."""
        return median(time.target_s for time in self.live.each)

    @property
    def break_even(self) -> float:
        """The acceptance length below which a draft slows things down."""
        return (self.draft_s + self.verify_s) / self.plain_step_s

    def predicted(self, acceptance_length: float) -> float:
        return acceptance_length / self.break_even

    @property
    def gains(self) -> list[float]:
        """Per text: tokens per second with the draft over tokens per second without."""
        live, plain = self.live, self.plain
        texts = zip(live.tokens, live.decode_s, plain.tokens, plain.decode_s, strict=True)
        return [(drafted / s) / (own / own_s) for drafted, s, own, own_s in texts]

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


# --- side by side --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """How one answer was decoded after the prompt's pass, which yields its first token."""

    token_ids: list[int]
    pieces: list[str]  # the text of each token; together they are the answer
    depths: list[int]  # by token: how far ahead the draft wrote it, 0 if the target did
    moments: list[tuple[float, int]]  # (seconds after the first token, number of tokens by then)

    @classmethod
    def of(cls, text: Generation, each: Sequence[RoundTime], tokenizer: Any) -> "Course":
        emitted = [r.emitted for r in text.rounds] or [1] * len(each)  # no draft: one per round
        ends = accumulate((time.seconds for time in each), initial=0.0)
        counts = accumulate(emitted, initial=1)
        new = len(text.token_ids)
        depths = drafted_depths(text.rounds, prompt=len(text.prompt_ids), new=new)
        stream = Pieces(tokenizer)
        *pieces, last = stream.add(text.token_ids)
        moments = list(zip(ends, counts, strict=True))
        return cls(text.token_ids, [*pieces, last + stream.rest()], depths, moments)

    @property
    def passes(self) -> int:
        """The number of passes of the target."""
        return len(self.moments) - 1

    @property
    def seconds(self) -> float:
        return self.moments[-1][0]

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.seconds

    def known(self, seconds: float) -> int:
        """The number of tokens decoded by then."""
        return max(count for end, count in self.moments if end <= seconds)


@dataclass(frozen=True)
class SideBySide:
    plain: Course
    drafted: Course
    speed: Speed

    @property
    def same(self) -> bool:
        return self.plain.token_ids == self.drafted.token_ids


def decode_both(
    target: HFEagle3TargetModel,
    draft: DraftModel,
    prompt_ids: Sequence[int],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
) -> SideBySide | None:
    """Decode one prompt without and then with the draft; None for an answer of a single token."""
    drafted = SpeculativeDecoder(
        target.model, draft, aux_layer_ids=target.aux_layer_ids, num_draft_tokens=num_draft_tokens
    )
    stops = Stops(max_new_tokens, eos_token_ids(target.model, target.tokenizer))
    watches, courses = [], []
    for decoder in (SpeculativeDecoder(target.model), drafted):
        decoder.generate([prompt_ids], Stops(min(8, max_new_tokens)))  # the first passes are slow
        [text] = decoder.generate([prompt_ids], stops)
        if not decoder.timing.rounds:
            return None
        watches.append(Stopwatch())
        watches[-1].add(decoder.timing, text)
        courses.append(Course.of(text, decoder.timing.each, target.tokenizer))
    return SideBySide(courses[0], courses[1], Speed(watches[0], watches[1]))
