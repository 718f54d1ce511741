"""One answer decoded without the draft and with it: which tokens were there when, for a display."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fledge.decode.clock import RoundTime
from fledge.decode.pieces import Pieces
from fledge.decode.rounds import drafted_depths
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.draft.base import DraftModel
from fledge.measure.speed import Speed, Stopwatch
from fledge.target.hf.model import HFEagle3TargetModel


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
    def gain(self) -> float:
        return self.speed.measured

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
    plain = SpeculativeDecoder(target.model)
    stops = Stops(max_new_tokens, eos_token_ids(target.model, target.tokenizer))
    watches: list[Stopwatch] = []
    courses: list[Course] = []
    for decoder in (plain, drafted):
        decoder.generate([prompt_ids], Stops(min(8, max_new_tokens)))  # the first passes are slow
        [text] = decoder.generate([prompt_ids], stops)
        if not decoder.timing.rounds:
            return None
        watch = Stopwatch()
        watch.add(decoder.timing, text)
        watches.append(watch)
        courses.append(Course.of(text, decoder.timing.each, target.tokenizer))
    return SideBySide(courses[0], courses[1], Speed(watches[0], watches[1]))
