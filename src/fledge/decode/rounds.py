"""Rounds of drafting and verification, live or replayed: the record that figures come from.

A round starts with `context` known tokens, drafts up to k more, and adds `emitted` tokens to the
text: the `accepted` drafted ones, then one of the target's own (the bonus token), unless the text
ended before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    context: int  # known tokens before the round, prompt included
    accepted: int  # drafted tokens that went into the text
    emitted: int  # tokens that the round added to the text


def walk_rounds(accepted_T: Sequence[int], *, prompt: int, total: int) -> list[Round]:
    """The rounds that live decoding would take through a known text.

    `accepted_T[t]` is how many drafted tokens hold when the rollout starts at slot t (which reads
    token t + 1 and drafts tokens t + 2, ...), counted inside the text. The first answer token comes
    from the prompt's own pass.

    Example: prompt of 3 tokens, text of 8, accepted_T = . . 1 0 0 2 0 0

        round 1: 4 known, slot 2 holds 1 -> token 4 drafted, token 5 the target's own
        round 2: 6 known, slot 4 holds 0 -> token 6 the target's own
        round 3: 7 known, slot 5 holds 2 of which one is left in the text -> token 7 drafted
    """
    rounds = []
    known = prompt + 1
    while known < total:
        left = total - known
        accepted = min(accepted_T[known - 2], left)
        emitted = min(accepted + 1, left)
        rounds.append(Round(known, accepted, emitted))
        known += emitted
    return rounds


def drafted_depths(rounds: Sequence[Round], *, prompt: int, new: int) -> list[int]:
    """Per new token: its depth (from 1) if the draft wrote it, 0 if the target did."""
    depths = [0] * new
    for round_ in rounds:  # a round adds its accepted tokens first, then the target's own
        begin = round_.context - prompt
        depths[begin : begin + round_.accepted] = range(1, round_.accepted + 1)
    return depths
