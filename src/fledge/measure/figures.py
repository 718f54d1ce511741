"""Acceptance figures from rounds, and the sentence that defines them.

Figures are reported with their definition: other projects count differently, and most arguments
about acceptance are about definitions. The second part says where a draft fails.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fledge.decode.accept import Round

_FIRST_BUCKET = 128


@dataclass(frozen=True)
class Text:
    """A prompt and the target's own greedy answer to it, as tokens."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class Sample(Text):
    """One text with the rounds that produced it."""

    rounds: Sequence[Round]
    category: str = ""
    accepted_T: Sequence[int] | None = None  # from every slot, when replayed
    group: str = ""  # the file or set its prompt came from


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
    pairs = ((round_, len(sample)) for sample in samples for round_ in sample.rounds)
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
            groups.setdefault(bound, []).append((round_, len(sample)))
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
        for slot in range(len(sample.prompt_ids) - 1, len(sample) - 2):
            for k in range(min(depth, len(sample) - slot - 2)):
                tried[k] += 1
                hits[k] += sample.accepted_T[slot] > k
    return 1.0 + sum(hit / n for hit, n in zip(hits, tried, strict=True) if n)


def definition(drafted: str) -> str:
    """The sentence that accompanies every figure; `drafted` is a strategy's label."""
    return (
        "acceptance length = tokens per round of drafting and verification: the accepted drafted "
        "tokens and the one the target adds (bonus token counted; the first token of an answer "
        "belongs to no round; a round that the end of the text cuts short counts what it added; "
        "vLLM's counters, which `fledge bench` shows, count all that it verified). "
        f"{drafted[0].upper()}{drafted[1:]} per round, temperature 0, on the "
        "target's own answers"
    )


# --- causes --------------------------------------------------------------------------------------
# Where a draft fails: every first rejection, with its cost, is attributed to one cause.
#
# A round that drafts K tokens adds at most K + 1 to the text. The shortfall is its loss; averaged
# over all rounds, that is the lost length: K + 1 - acceptance length. It has two parts:
#
#     K + 1 - added  =  (room - added)    +  (K + 1 - room)       room = min(K + 1, tokens left)
#                       its rejection's      the end of the text's
#
# A round without a rejection adds all that there is room for, and is charged to no cause. A
# rejection is charged to the first of `CAUSES` that applies, so the shares of all causes and of the
# end of the text sum to 1. A share is an upper bound on what a remedy gains: the next token may be
# rejected too.


LONG_CONTEXT = 2048  # tokens; used where the length of a draft's training rows is unknown


class Cause(NamedTuple):
    """A cause of rejections, as reports name it."""

    title: str
    remedy: str


# The first cause that applies is charged, so the order matters: what no training can fix comes
# first, then where the round is, then where the token is in it.
CAUSES = {
    "vocabulary": Cause(
        "outside the draft vocabulary",
        "a larger draft.draft_vocab_size, or one chosen on rows like these prompts",
    ),
    "context": Cause("long context", "training rows as long as these texts: data.max_length"),
    "depth": Cause(
        "deep positions", "fewer --draft-tokens, or training that looks that many tokens ahead"
    ),
    "rest": Cause("rest", "more rows and steps, or a larger draft (draft.layers)"),
}


@dataclass
class Blame:
    """One cause over all rounds."""

    judged: int = 0  # drafted tokens to which it applies, compared with the text's
    rejected: int = 0  # of these, those that ended their round
    lost: int = 0  # tokens that these rounds failed to add


@dataclass(frozen=True)
class Failures:
    """Where some rounds lost their length."""

    rounds: int
    depth: int  # K
    blames: dict[str, Blame]  # every cause, in the order in which they are checked
    ended: int  # tokens for which the text had no room left
    tokens: int  # of the answers, those that could have been drafted: all but the first
    outside: int  # of these, those outside the draft vocabulary

    @property
    def lost(self) -> int:
        return self.ended + sum(blame.lost for blame in self.blames.values())

    @property
    def lost_length(self) -> float:
        """K + 1 - acceptance length."""
        return self.lost / max(1, self.rounds)

    @property
    def largest(self) -> str | None:
        """The cause that is charged with the most; None if nothing was rejected."""
        name = max(self.blames, key=lambda name: self.blames[name].lost)
        return name if self.blames[name].lost else None

    @property
    def remedy(self) -> str:
        """What to change, in one line."""
        if self.largest is None:
            return "nothing was lost to a rejection"
        cause, share = CAUSES[self.largest], self._part(self.blames[self.largest].lost)["share"]
        return f"largest cause: {cause.title} ({share:.0%}); what helps: {cause.remedy}"

    def misses(self) -> dict[str, Any]:
        """What the draft vocabulary lacks: no training helps there, only a larger vocabulary."""
        ended = self.blames["vocabulary"].rejected / self.rounds if self.rounds else 0.0
        share = self.outside / self.tokens if self.tokens else 0.0
        return {"token_share": share, "ended_round_share": ended, "tokens": self.outside}

    def _part(self, lost: int) -> dict[str, float]:
        """Some lost tokens, per round and as a share of all."""
        share = lost / self.lost if self.lost else 0.0
        return {"lost_length": lost / max(1, self.rounds), "share": share}

    def to_json(self) -> dict[str, Any]:
        causes = {
            name: {"title": CAUSES[name].title, **self._part(blame.lost)}
            | {"judged": blame.judged, "rejected": blame.rejected}
            for name, blame in self.blames.items()
        }
        return {
            "lost_length": self.lost_length,
            "causes": causes,
            "end_of_text": self._part(self.ended),
            "largest": self.largest,
            "remedy": self.remedy,
        }


def failures(
    samples: Iterable[Sample],
    depth: int,
    can_say: Callable[[int], bool],
    *,
    long_context: int = LONG_CONTEXT,
) -> Failures:
    """Attribute every rejection. `can_say`: whether a token is in the draft vocabulary. A round has
    a long context if it starts after more than `long_context` tokens."""
    blames = {name: Blame() for name in CAUSES}
    rounds = ended = tokens = outside = 0
    for sample in samples:
        prompt = len(sample.prompt_ids)
        tokens += len(sample.answer_ids[1:])
        outside += sum(not can_say(token) for token in sample.answer_ids[1:])
        for round_ in sample.rounds:
            rounds += 1
            left = len(sample) - round_.context
            room, reach = min(depth + 1, left), min(depth, left)
            ended += depth + 1 - room
            for place in range(min(round_.accepted + 1, reach)):
                # in the answer, whose first token belongs to no round
                index = round_.context + place - prompt
                if not can_say(sample.answer_ids[index]):
                    cause = "vocabulary"
                elif round_.context > long_context:
                    cause = "context"
                else:  # deep: past the first half of the drafted tokens
                    cause = "depth" if 2 * place >= depth else "rest"
                blames[cause].judged += 1
                if place == round_.accepted:
                    blames[cause].rejected += 1
                    blames[cause].lost += room - round_.emitted
    return Failures(rounds, depth, blames, ended, tokens, outside)
