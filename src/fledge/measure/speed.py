"""Whether a draft pays off: step times, the speed-up they predict, and the measured one.

Rounds are timed one by one and their *median* is used, so that a machine that is busy for a moment
does not distort it. On one that is busy all the time, a plain step may still take longer than a
whole round: the clock is then called disturbed, and no speed-up is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, quantiles
from typing import Any, NamedTuple

from fledge.decode.recorded import RoundTime, Timing
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Pieces, Stops, eos_token_ids
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel

DISTURBED = "the clock was disturbed: measure again"


class TimedText(NamedTuple):
    """One decoded text."""

    tokens: int  # without the first, which comes from the prompt's pass
    timing: Timing

    @classmethod
    def of(cls, text: Generation, timing: Timing) -> "TimedText":
        return cls(len(text.token_ids) - 1, timing)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.timing.decode_s


@dataclass(frozen=True)
class Speed:
    """The times of the same texts decoded with and without a draft, one at a time.

    A round costs one draft and one verification and yields `acceptance length` tokens, each of
    which would have cost one plain step.
    """

    plain: Sequence[TimedText]
    live: Sequence[TimedText]

    @property
    def live_rounds(self) -> list[RoundTime]:
        return [time for text in self.live for time in text.timing.each]

    @property
    def plain_steps_s(self) -> list[float]:
        return [time.seconds for text in self.plain for time in text.timing.each]

    @property
    def plain_step_s(self) -> float:
        return median(self.plain_steps_s)

    @property
    def draft_s(self) -> float:
        """Per round, for all drafted tokens."""
        return median(time.draft_s for time in self.live_rounds)

    @property
    def verify_s(self) -> float:
        """Per round, for the target over all of them and for dropping what was rejected."""
        return median(time.target_s for time in self.live_rounds)

    @property
    def tokens_per_round(self) -> float:
        return sum(text.tokens for text in self.live) / len(self.live_rounds)

    @property
    def break_even(self) -> float:
        """The acceptance length below which a draft slows things down."""
        return (self.draft_s + self.verify_s) / self.plain_step_s

    @property
    def gains(self) -> list[float]:
        """Per text: tokens per second with the draft over tokens per second without."""
        texts = zip(self.live, self.plain, strict=True)
        return [live.tokens_per_s / plain.tokens_per_s for live, plain in texts]

    @property
    def measured(self) -> float:
        return median(self.gains)

    @property
    def disturbed(self) -> bool:
        """Whether the times are implausible: a round includes a plain step, so it cannot be faster,
        and a text cannot gain more than the tokens per round."""
        return self.break_even < 1 or self.measured > self.tokens_per_round

    def to_json(self, acceptance_length: float) -> dict[str, Any]:
        times: dict[str, Any] = {
            "texts": len(self.live),
            "rounds": len(self.live_rounds),
            "plain_steps": len(self.plain_steps_s),
            "disturbed": self.disturbed,
            "plain_step_ms": 1e3 * self.plain_step_s,
            "draft_ms_per_round": 1e3 * self.draft_s,
            "verify_ms_per_round": 1e3 * self.verify_s,
            "plain_step_ms_quartiles": quartiles(self.plain_steps_s, 1e3),
            "round_ms_quartiles": quartiles([time.seconds for time in self.live_rounds], 1e3),
        }
        gains: dict[str, Any] = {
            "break_even_acceptance_length": self.break_even,
            "predicted_speedup": acceptance_length / self.break_even,
            "predicted_speedup_live_sample": self.tokens_per_round / self.break_even,
            "measured_speedup_live_sample": self.measured,
            "measured_speedup_quartiles": quartiles(self.gains),
            "plain_tokens_per_s": median(text.tokens_per_s for text in self.plain),
            "speculative_tokens_per_s": median(text.tokens_per_s for text in self.live),
        }
        return times | (dict.fromkeys(gains) if self.disturbed else gains)


def quartiles(values: list[float], scale: float = 1.0) -> list[float]:
    """The first and third quartile, between which the middle half of the values lies."""
    first, _, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [scale * first, scale * third]


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
        stream = Pieces(tokenizer)
        *pieces, last = stream.add(text.token_ids)
        moments = list(zip(ends, counts, strict=True))
        return cls(text.token_ids, [*pieces, last + stream.rest()], text.depths, moments)

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
    timed, courses = [], []
    for decoder in (SpeculativeDecoder(target.model), drafted):
        decoder.generate([prompt_ids], Stops(min(8, max_new_tokens)))  # the first passes are slow
        [text] = decoder.generate([prompt_ids], stops)
        if not decoder.timing.rounds:
            return None
        timed.append([TimedText.of(text, decoder.timing)])
        courses.append(Course.of(text, decoder.timing.each, target.tokenizer))
    return SideBySide(courses[0], courses[1], Speed(*timed))
