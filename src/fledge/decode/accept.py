"""Which proposed tokens are accepted: the rules that make speculative decoding lossless, and the
rounds that figures come from.

Without sampling, or with a tree, the target picks its own token after every node; the walk goes on
while the proposal contains it. Where either model's numbers are not finite, nothing is accepted:
NO_TOKEN equals no token. Shapes: N proposed tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.head import NO_TOKEN, tokens_of


@dataclass(frozen=True)
class Proposal:
    """Tokens for the target to judge, as target ids."""

    token_BN: Tensor  # NO_TOKEN (`core.head`): nothing proposed, or not a number; never accepted
    parent_BN: Tensor | None = None  # index of the parent, -1: the verified text; None: a chain
    probs_BNW: Tensor | None = None  # the distributions they were drawn from; None: greedy

    @classmethod
    def picked(cls, token_BN: Tensor, top_BN: Tensor, probs_BNW: Tensor | None) -> "Proposal":
        """A chain of tokens as `Chooser.pick` returns them, translated to target ids."""
        if probs_BNW is None:
            token_BN = tokens_of(token_BN, top_BN)
        return cls(token_BN, probs_BNW=probs_BNW)

    @classmethod
    def stacked(cls, steps: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> "Proposal":
        """The same, from one token after another: [B], [B] and [B, W] each."""
        tokens, tops, probs = zip(*steps, strict=True)
        probs_BNW = None if probs[0] is None else torch.stack(probs, 1)
        return cls.picked(torch.stack(tokens, 1), torch.stack(tops, 1), probs_BNW)


@dataclass(frozen=True)
class Chooser:
    """How a token is picked from logits: the likeliest, or drawn at a temperature."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return torch.softmax(logits.to(wide) / self.temperature, dim=-1)

    def draw(self, probs: Tensor) -> Tensor:
        """[...] one token drawn from each distribution [..., V]."""
        flat = probs.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probs.shape[:-1])

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tokens, the largest logits, and the distributions that the tokens were drawn from
        (None when greedy). Where the largest logit is not finite, the token is meaningless
        (`core.head`)."""
        if self.temperature == 0:
            top, token = logits.max(dim=-1)
            return token, top, None
        top = logits.amax(dim=-1)
        # uniform where they are not finite: on a GPU, sampling from NaN ends the process
        probs = self.probabilities(logits.masked_fill(~top.isfinite()[..., None], 0.0))
        return self.draw(probs), top, probs

    def pick_sound(self, logits: Tensor) -> Tensor:
        """The tokens; NO_TOKEN where the logits are not finite."""
        token, top, _ = self.pick(logits)
        return tokens_of(token, top)


@dataclass(frozen=True)
class Verdict:
    """One row's accepted nodes in order, and their tokens followed by the target's own."""

    path: list[int]
    tokens: list[int]


def pack_picks(proposal: Proposal, logits_BNV: Tensor, chooser: Chooser) -> Tensor:
    """Tokens, parents (of a tree) and the target's picks in one tensor: one copy to the host.

    `logits_BNV` [B, N + 1, V]: after the verified text, then after each node.
    """
    parts = (proposal.token_BN, proposal.parent_BN, chooser.pick_sound(logits_BNV))
    return torch.cat([part for part in parts if part is not None], dim=1)


def judge(packed: Sequence[Sequence[int]], count: int) -> list[Verdict]:
    """Walk every row of the output of `pack_picks`, with `count` proposed tokens each."""
    chain = range(-1, count - 1)
    verdicts = []
    for row in packed:
        tokens, parents, picks = row[:count], row[count : -count - 1], row[-count - 1 :]
        verdicts.append(walk(tokens, parents or chain, picks))
    return verdicts


def walk(tokens: Sequence[int], parents: Sequence[int], picks: Sequence[int]) -> Verdict:
    """Follow the target's picks down the tree; `picks[0]` is after the verified text."""
    path: list[int] = []
    at = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        # parents precede their children: one pass is enough
        if parent == at and token == picks[at + 1] != NO_TOKEN:
            path.append(node)
            at = node
    return Verdict(path, [*(tokens[node] for node in path), picks[at + 1]])


def judge_drawn(
    proposal: Proposal, logits_BNV: Tensor, chooser: Chooser, selected_W: Tensor
) -> list[Verdict]:
    """Rejection sampling, for a chain that was drawn from the draft's own distribution q.

    Token x stays with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw
    from max(p - q, 0), normalized: every emitted token is then distributed exactly as p. Tokens
    outside the draft vocabulary have q = 0.
    """
    assert proposal.probs_BNW is not None
    top_BN = logits_BNV.amax(dim=-1)
    sound_BN = top_BN.isfinite()
    p_BNV = chooser.probabilities(logits_BNV.masked_fill(~sound_BN[..., None], 0.0))
    q_BNV = torch.zeros_like(p_BNV)  # stays 0 after the last node, where nothing is proposed
    q_BNV[:, :-1, selected_W] = proposal.probs_BNW.to(p_BNV.dtype)
    token_BN1 = proposal.token_BN[..., None]
    p_BN, q_BN = (x[:, :-1].gather(2, token_BN1)[..., 0] for x in (p_BNV, q_BNV))
    chance_BN = acceptance_probability(p_BN, q_BN) * sound_BN[:, :-1]
    draw_BN = torch.rand(
        chance_BN.shape, generator=chooser.generator, device=p_BN.device, dtype=p_BN.dtype
    )
    accepted_B = (draw_BN < chance_BN).long().cumprod(dim=1).sum(dim=1)
    rows_B = torch.arange(len(accepted_B), device=p_BN.device)
    token_B = chooser.draw(residual(p_BNV[rows_B, accepted_B], q_BNV[rows_B, accepted_B]))
    token_B = tokens_of(token_B, top_BN[rows_B, accepted_B])
    columns = (proposal.token_BN, accepted_B[:, None], token_B[:, None])
    packed = torch.cat(columns, dim=1).tolist()
    return [Verdict(list(range(n)), [*drafted[:n], last]) for *drafted, n, last in packed]


def acceptance_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) for a token that was drawn from q (so q > 0); 0 where q = 0, which means that
    there is no token: a strategy that stops early proposes nothing there."""
    return torch.where(q > 0, (p / q).clamp_max(1.0), 0.0)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """The distribution that replaces a rejected token; p itself where p <= q up to rounding."""
    left_BV = (p_BV - q_BV).clamp_min(0)
    total_B1 = left_BV.sum(dim=-1, keepdim=True)
    return torch.where(total_B1 > 0, left_BV / total_B1, p_BV)


# --- rounds --------------------------------------------------------------------------------------
# A round, live or replayed, starts with `context` known tokens, drafts up to k more, and adds
# `emitted` tokens to the text: the `accepted` drafted ones, then one of the target's own (the bonus
# token), unless the text ended before it.


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
