"""Whether a draft pays: step times, the speed-up they predict, and the measured one."""

from dataclasses import dataclass
from typing import Any

from fledge.decode.speculative import Generation, Timing


@dataclass
class Stopwatch:
    """Times of several texts, decoded one way."""

    tokens: int = 0  # without each text's first, which comes from the prompt's pass
    rounds: int = 0
    decode_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0

    def add(self, timing: Timing, text: Generation) -> None:
        self.tokens += len(text.token_ids) - 1
        self.rounds += timing.rounds
        self.decode_s += timing.decode_s
        self.draft_s += timing.draft_s
        self.target_s += timing.target_s


@dataclass(frozen=True)
class Speed:
    """The times of the same texts decoded both ways, one at a time.

    A round costs one draft and one verification and yields `acceptance length` tokens, each of
    which would have cost one plain step.
    """

    plain: Stopwatch
    live: Stopwatch

    @classmethod
    def of(cls, plain: Stopwatch, live: Stopwatch) -> "Speed | None":
        """None when there was no round to time."""
        return cls(plain, live) if plain.rounds and live.rounds else None

    @property
    def plain_step_s(self) -> float:
        return self.plain.decode_s / self.plain.rounds

    @property
    def draft_s(self) -> float:
        """Per round: all drafted tokens."""
        return self.live.draft_s / self.live.rounds

    @property
    def verify_s(self) -> float:
        """Per round: the target over all of them, and taking back what was rejected."""
        return self.live.target_s / self.live.rounds

    @property
    def break_even(self) -> float:
        """The acceptance length below which a draft slows things down."""
        return (self.draft_s + self.verify_s) / self.plain_step_s

    def predicted(self, acceptance_length: float) -> float:
        return acceptance_length / self.break_even

    @property
    def measured(self) -> float:
        """Tokens per second with the draft over tokens per second without."""
        return self._tokens_per_s(self.live) / self._tokens_per_s(self.plain)

    @staticmethod
    def _tokens_per_s(watch: Stopwatch) -> float:
        return watch.tokens / watch.decode_s

    def to_json(self, acceptance_length: float) -> dict[str, Any]:
        return {
            "plain_step_ms": 1e3 * self.plain_step_s,
            "draft_ms_per_round": 1e3 * self.draft_s,
            "verify_ms_per_round": 1e3 * self.verify_s,
            "break_even_acceptance_length": self.break_even,
            "predicted_speedup": self.predicted(acceptance_length),
            "predicted_speedup_live_sample": self.predicted(self.live.tokens / self.live.rounds),
            "measured_speedup_live_sample": self.measured,
            "plain_tokens_per_s": self._tokens_per_s(self.plain),
            "speculative_tokens_per_s": self._tokens_per_s(self.live),
        }
