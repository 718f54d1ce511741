"""Who wrote each token of an answer, and both models' probabilities: the report colors them.

The accepted tokens of a round are the draft's, at depths 1, 2, ..., and the token after them is the
target's. Probabilities come from one pass of each model over the finished text, as in replay: at
the slot and depth where a token was drafted live.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fledge.core.head import TargetHead
from fledge.decode.rounds import Round
from fledge.decode.stops import Pieces
from fledge.decode.strategy import Rollouts
from fledge.measure.replay import Text, as_pack, ask
from fledge.target.base import Eagle3TargetBackend


@dataclass(frozen=True)
class Drafted:
    """What the draft proposed in one place."""

    token: int
    probability: float  # of its own token
    of_text: float  # of the text's token


@dataclass(frozen=True)
class WrittenToken:
    """One token of an answer."""

    text: str
    depth: int  # drafted and accepted as the k-th of its round; 0: the target's own
    round: int  # from 0; -1: the first token, which belongs to no round
    target_p: float | None = None
    draft_p: float | None = None  # None: the draft was not evaluated here
    instead: str | None = None  # what the draft proposed, where the target rejected it
    instead_p: float | None = None

    def to_json(self) -> list[Any]:
        """A compact row, since a page holds thousands."""
        numbers = [None if p is None else round(p, 4) for p in (self.target_p, self.draft_p)]
        last = None if self.instead_p is None else round(self.instead_p, 4)
        return [self.text, self.depth, self.round, *numbers, self.instead, last]


def written_tokens(
    text: Text,
    rounds: Sequence[Round],
    tokenizer: Any,
    *,
    target_p: Sequence[float | None] = (),
    drafted: dict[tuple[int, int], Drafted] | None = None,
) -> list[WrittenToken]:
    """The answer's tokens. `drafted` is keyed by (context of the round, depth from 0); `target_p`
    has one entry per token."""
    drafted = drafted or {}
    prompt = len(text.prompt_ids)
    pieces = Pieces(tokenizer, skip_special_tokens=False).add(text.answer_ids)
    places: dict[int, tuple[int, int, Drafted | None]] = {prompt: (-1, 0, None)}
    places |= {
        r.context + k: (number, k + 1 if k < r.accepted else 0, drafted.get((r.context, k)))
        for number, r in enumerate(rounds)
        for k in range(r.emitted)
    }
    tokens = []
    for index, piece in enumerate(pieces):
        number, depth, proposed = places[prompt + index]
        token = WrittenToken(piece, depth, number, target_p[index] if target_p else None)
        if proposed is not None:
            token = replace(token, draft_p=proposed.of_text)
            if depth == 0:
                instead = tokenizer.decode([proposed.token])
                token = replace(token, instead=instead, instead_p=proposed.probability)
        tokens.append(token)
    return tokens


@torch.no_grad()
def look_closely(
    target: Eagle3TargetBackend,
    rollouts: Rollouts,
    text: Text,
    rounds: Sequence[Round],
    tokenizer: Any,
) -> list[WrittenToken]:
    """The tokens of a replayed text with both models' probabilities."""
    tokens = as_pack([text])
    batch = ask(target, tokens)
    assert batch.last_hidden_states is not None
    total, prompt = len(text), len(text.prompt_ids)
    ids = [*text.prompt_ids, *text.answer_ids]
    probabilities = _target_probabilities(
        batch.last_hidden_states[0], target.info().head, ids, range(max(2, prompt), total)
    )
    by_depth: dict[int, list[Round]] = {}  # rounds that drafted a token inside the text there
    for r in rounds:
        for k in range(min(rollouts.depths, r.accepted + 1, total - r.context)):
            by_depth.setdefault(k, []).append(r)
    drafted: dict[tuple[int, int], Drafted] = {}
    if by_depth:
        plan = rollouts.plan(tokens)
        for depth, (rows, states_NE) in enumerate(
            zip(plan.depths, rollouts.head_inputs(batch, plan), strict=True)
        ):
            row_of = {slot: row for row, slot in enumerate(plan.slot_T[rows.slot_N].tolist())}
            drafting = by_depth.get(depth, [])
            states_ME = states_NE[[row_of[r.context - 2] for r in drafting]]
            text_ids = [ids[r.context + depth] for r in drafting]
            for r, token in zip(drafting, _drafted(rollouts, states_ME, text_ids), strict=True):
                drafted[r.context, depth] = token
    target_p = [probabilities.get(index) for index in range(prompt, total)]
    return written_tokens(text, rounds, tokenizer, target_p=target_p, drafted=drafted)


def _target_probabilities(
    hidden_TD: Tensor, head: TargetHead, ids: Sequence[int], places: Iterable[int]
) -> dict[int, float]:
    """The probabilities of some tokens of a text, by their place; slot t predicts token t + 2."""
    probabilities: dict[int, float] = {}
    for part in torch.split(torch.tensor(list(places)), 256):
        logits_NV = head.logits(hidden_TD[(part - 2).to(hidden_TD.device)])
        probs_NV = torch.softmax(logits_NV.float(), dim=-1).cpu()
        picked = torch.tensor([ids[place] for place in part.tolist()])[:, None]
        of_text = probs_NV.gather(1, picked)[:, 0].tolist()
        probabilities |= zip(part.tolist(), of_text, strict=True)
    return probabilities


def _drafted(rollouts: Rollouts, states_ME: Tensor, text_ids: Sequence[int]) -> list[Drafted]:
    """What the draft proposes in some places; `text_ids` are the text's tokens there."""
    selected_W = rollouts.selected_token_ids
    probs_MW = torch.softmax(rollouts.logits(states_ME).float(), dim=-1)
    best_M = probs_MW.max(dim=-1)
    text_M1 = torch.tensor(text_ids, device=selected_W.device, dtype=torch.long)[:, None]
    of_text_M = (probs_MW * (selected_W == text_M1)).sum(-1)
    columns = (selected_W[best_M.indices], best_M.values, of_text_M)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Drafted(*row) for row in rows]
