"""What the draft suggests in one round: a chain, or P-EAGLE's parallel tokens. Trees: `tree.py`.

Shapes: B rows, N proposed tokens of a row, W draft vocabulary, E draft hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.decode.drafter import Drafter, TrueSlots


@dataclass(frozen=True)
class Proposal:
    """Tokens for the target to judge, as target ids."""

    token_BN: Tensor
    parent_BN: Tensor | None = None  # index of the parent, -1: the verified text; None: a chain
    probs_BNW: Tensor | None = None  # what each token was drawn from; None: it was the likeliest


class Chooser:
    """How a token is picked from logits: the likeliest, or drawn at a temperature."""

    def __init__(self, temperature: float, generator: torch.Generator | None) -> None:
        self.temperature, self.generator = temperature, generator

    def probabilities(self, logits: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return torch.softmax(logits.to(wide) / self.temperature, dim=-1)

    def draw(self, probs: Tensor) -> Tensor:
        """[...] one token of each distribution [..., V]."""
        flat = probs.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probs.shape[:-1])

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens, and the distributions they were drawn from (None when greedy)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1), None
        probs = self.probabilities(logits)
        return self.draw(probs), probs


def propose_chain(drafter: Drafter, slots: TrueSlots, count: int, chooser: Chooser) -> Proposal:
    """EAGLE-3: one token after another, each from the draft's own last state and token."""
    state_BE = drafter.extend(slots)
    anchor_B1 = slots.anchor_B[:, None]
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    for depth in range(count):
        if depth > 0:
            state_BE = drafter.run(
                state_BE[:, None], tokens[-1][:, None], anchor_B1 + depth, used=slots.used
            )[:, 0]
        picked_B, probs_BW = chooser.pick(drafter.logits(state_BE))
        tokens.append(drafter.selected_W[picked_B])
        if probs_BW is not None:
            probs.append(probs_BW)
    return Proposal(torch.stack(tokens, 1), probs_BNW=torch.stack(probs, 1) if probs else None)


def propose_parallel(drafter: Drafter, slots: TrueSlots, count: int, chooser: Chooser) -> Proposal:
    """P-EAGLE: the verified slots and `count` - 1 mask slots behind them, in one pass.

    Rows differ in how many slots were verified: a shorter row simply has more mask slots, whose
    surplus lies behind everything that is read, and is overwritten.
    """
    draft = drafter.draft
    batch, width = slots.token_BQ.shape
    place_Q = torch.arange(width + count - 1, device=drafter.device)
    count_B1 = slots.count_B[:, None]
    real_BQ = place_Q < count_B1
    padded_BQ = F.pad(slots.token_BQ, (0, count - 1))
    token_BQ = padded_BQ.masked_fill(~real_BQ, draft.config.mask_token_id)
    placeholder_11E = draft.project_hidden_states(draft.mask_hidden, drafter.dtype)
    true_BQE = draft.project_hidden_states(slots.aux_BQD, drafter.dtype)
    state_BQE = F.pad(true_BQE, (0, 0, 0, count - 1)).where(real_BQ[..., None], placeholder_11E)
    index_BQ = slots.start_B[:, None] + place_Q
    state_BQE = drafter.run(state_BQE, token_BQ, index_BQ, used=slots.used)
    rows_B1 = torch.arange(batch, device=drafter.device)[:, None]
    asking_BN = count_B1 - 1 + torch.arange(count, device=drafter.device)
    picked_BN, probs_BNW = chooser.pick(drafter.logits(state_BQE[rows_B1, asking_BN]))
    return Proposal(drafter.selected_W[picked_BN], probs_BNW=probs_BNW)
