"""Does it pay? Step times, the speed-up they predict, and the one that was measured."""

from dataclasses import dataclass
from typing import Any

from fledge.decode.speculative import Timing


@dataclass(frozen=True)
class Speed:
    """Seconds per pass at batch size 1, and what follows from them.

    A round costs one draft and one verification and yields `acceptance length` tokens, each of
    which would have cost one plain step.
    """

    plain_step_s: float
    draft_s: float  # per round: all drafted tokens
    verify_s: float  # per round: the target over all of them
    plain_tokens: int  # of the live sample, whose tokens both ways produced
    plain_decode_s: float
    live_tokens: int
    live_decode_s: float

    @classmethod
    def of(
        cls, plain: Timing, live: Timing, *, plain_tokens: int, live_tokens: int
    ) -> "Speed | None":
        if not plain.rounds or not live.rounds:
            return None  # answers of one token: there was no round to time
        return cls(
            plain_step_s=plain.decode_s / plain.rounds,
            draft_s=live.draft_s / live.rounds,
            verify_s=live.target_s / live.rounds,
            plain_tokens=plain_tokens,
            plain_decode_s=plain.decode_s,
            live_tokens=live_tokens,
            live_decode_s=live.decode_s,
        )

    @property
    def break_even(self) -> float:
        """The acceptance length below which a draft slows things down."""
        return (self.draft_s + self.verify_s) / self.plain_step_s

    def predicted(self, acceptance_length: float) -> float:
        return acceptance_length / self.break_even

    @property
    def measured(self) -> float:
        """Tokens per second with the draft over tokens per second without."""
        return (self.live_tokens / self.live_decode_s) / (self.plain_tokens / self.plain_decode_s)

    def to_json(self, acceptance_length: float, live_length: float) -> dict[str, Any]:
        return {
            "plain_step_ms": 1e3 * self.plain_step_s,
            "draft_ms_per_round": 1e3 * self.draft_s,
            "verify_ms_per_round": 1e3 * self.verify_s,
            "break_even_acceptance_length": self.break_even,
            "predicted_speedup": self.predicted(acceptance_length),
            "predicted_speedup_live_sample": self.predicted(live_length),
            "measured_speedup_live_sample": self.measured,
            "plain_tokens_per_s": self.plain_tokens / self.plain_decode_s,
            "speculative_tokens_per_s": self.live_tokens / self.live_decode_s,
        }
