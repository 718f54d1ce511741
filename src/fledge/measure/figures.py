"""Acceptance figures from rounds, and the sentence that defines them.

Figures are reported with their definition: other projects count differently, and most arguments
about acceptance are about definitions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.decode.rounds import Round

_FIRST_BUCKET = 128


@dataclass(frozen=True)
class Sample:
    """One text with the rounds that produced it."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    rounds: Sequence[Round]
    category: str = ""
    accepted_T: Sequence[int] | None = None  # from every slot, when replayed
    group: str = ""  # the file or set its prompt came from

    @property
    def total(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class Acceptance:
    """Counts over some rounds. Position k counts the rounds whose text reaches that far."""

    rounds: int
    emitted: int
    tried: tuple[int, ...]  # rounds in which position k could be judged against the text
    reached: tuple[int, ...]  # of these, rounds in which all before it were accepted
    accepted: tuple[int, ...]  # of these, rounds in which it was accepted too

    @classmethod
    def none(cls, depth: int) -> "Acceptance":
        zeros = (0,) * depth
        return cls(0, 0, zeros, zeros, zeros)

    def counts(self) -> list[int]:
        """All counts in one list; lists of several sets of rounds can be added elementwise."""
        return [self.rounds, self.emitted, *self.tried, *self.reached, *self.accepted]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> "Acceptance":
        rounds, emitted, *rest = counts
        depth = len(rest) // 3
        parts = [tuple(rest[i * depth : (i + 1) * depth]) for i in range(3)]
        return cls(rounds, emitted, *parts)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        pairs = zip(self.counts(), other.counts(), strict=True)
        return Acceptance.from_counts([a + b for a, b in pairs])

    @property
    def length(self) -> float:
        """Tokens per round; 0 without rounds."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def joint(self) -> list[float]:
        """P(tokens 1..k all accepted)."""
        return _shares(self.accepted, self.tried)

    @property
    def conditional(self) -> list[float]:
        """P(token k accepted | those before it accepted)."""
        return _shares(self.accepted, self.reached)

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.length,
            "rounds": self.rounds,
            "tokens": self.emitted,
            "joint": self.joint,
            "conditional": self.conditional,
        }


def count_rounds(pairs: Iterable[tuple[Round, int]], depth: int) -> Acceptance:
    """The acceptance of (round, total tokens of its text) pairs; a round drafts at most `depth`
    tokens."""
    rounds = emitted = 0
    tried, reached, accepted = [0] * depth, [0] * depth, [0] * depth
    for round_, total in pairs:
        rounds += 1
        emitted += round_.emitted
        for k in range(min(depth, total - round_.context)):
            tried[k] += 1
            reached[k] += round_.accepted >= k
            accepted[k] += round_.accepted > k
    return Acceptance(rounds, emitted, tuple(tried), tuple(reached), tuple(accepted))


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]


def acceptance(samples: Iterable[Sample], depth: int) -> Acceptance:
    pairs = ((round_, sample.total) for sample in samples for round_ in sample.rounds)
    return count_rounds(pairs, depth)


def by_label(
    samples: Sequence[Sample], depth: int, label: Callable[[Sample], str]
) -> dict[str, Acceptance]:
    parts: dict[str, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(label(sample), []).append(sample)
    return {name: acceptance(parts[name], depth) for name in sorted(parts)}


def by_context(samples: Iterable[Sample], depth: int) -> dict[str, Acceptance]:
    """The acceptance by number of known tokens when a round starts: up to 128, 256, 512, ..."""
    groups: dict[int, list[tuple[Round, int]]] = {}
    for sample in samples:
        for round_ in sample.rounds:
            bound = _FIRST_BUCKET
            while bound < round_.context:
                bound *= 2
            groups.setdefault(bound, []).append((round_, sample.total))
    return {f"<= {bound}": count_rounds(groups[bound], depth) for bound in sorted(groups)}


def every_slot_length(samples: Iterable[Sample], depth: int) -> float | None:
    """What training estimates: 1 + sum over k of P(tokens 1..k right), starting at every slot.

    None for rounds that were not replayed. It differs from tokens per round because live rounds do
    not start everywhere: after a long accepted run they skip the easy slots.
    """
    tried, hits = [0] * depth, [0] * depth
    for sample in samples:
        if sample.accepted_T is None:
            return None
        for slot in range(len(sample.prompt_ids) - 1, sample.total - 2):
            for k in range(min(depth, sample.total - slot - 2)):
                tried[k] += 1
                hits[k] += sample.accepted_T[slot] > k
    return 1.0 + sum(hit / n for hit, n in zip(hits, tried, strict=True) if n)


@dataclass(frozen=True)
class VocabularyMisses:
    """Tokens outside the draft vocabulary: no training helps there, only a larger vocabulary."""

    tokens: int  # answer tokens that a draft could have drafted
    outside: int  # of these, outside the draft vocabulary
    rounds: int
    ended_rounds: int  # rounds whose first rejected token was one of them

    def to_json(self) -> dict[str, Any]:
        share = self.outside / self.tokens if self.tokens else 0.0
        ended = self.ended_rounds / self.rounds if self.rounds else 0.0
        return {"token_share": share, "ended_round_share": ended, "tokens": self.outside}


def vocabulary_misses(
    samples: Iterable[Sample], depth: int, can_say: Callable[[int], bool]
) -> VocabularyMisses:
    tokens = outside = rounds = ended = 0
    for sample in samples:
        text = [*sample.prompt_ids, *sample.answer_ids]
        drafted = text[len(sample.prompt_ids) + 1 :]
        tokens += len(drafted)
        outside += sum(not can_say(token) for token in drafted)
        for round_ in sample.rounds:
            rounds += 1
            missed = round_.context + round_.accepted
            if round_.accepted < min(depth, round_.emitted):
                ended += not can_say(text[missed])
    return VocabularyMisses(tokens, outside, rounds, ended)


def definition(drafted: str, *, temperature: float = 0.0) -> str:
    """The sentence that accompanies every figure; `drafted` is a strategy's label."""
    return (
        "acceptance length = tokens per round of drafting and verification: the accepted drafted "
        "tokens and the one the target adds (bonus token counted; the first token of an answer "
        "belongs to no round; a round that the end of the text cuts short counts what it added; "
        "vLLM's counters, which `fledge bench` shows, count all that it verified). "
        f"{drafted[0].upper()}{drafted[1:]} per round, temperature {temperature:g}, on the "
        "target's own answers"
    )
