"""EAGLE-3's strategy: one token after another, each from the draft's own last state and token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.core.head import tokens_of
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.drafter import DrafterStrategy
from fledge.decode.strategy import Rollouts, RoundState
from fledge.rollout.plan import RolloutPlan


class ChainRollouts(Rollouts):
    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        states: list[Tensor] = self.draft.unroll(aux_TD, ids_T, plan, compute_dtype=self.dtype)
        return states


class Chain(DrafterStrategy):
    drafted = "chain"
    rollouts = ChainRollouts

    @property
    def label(self) -> str:
        return f"a chain of k = {self.count} drafted tokens"

    @property
    def slots(self) -> int:
        return self.count + 1

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        drafter = self.drafter
        carried_BE = drafter.extend(state)
        anchor_B1 = state.anchor_B[:, None]
        tokens: list[Tensor] = []
        tops: list[Tensor] = []
        probs: list[Tensor] = []
        for depth in range(self.count):
            if depth > 0:
                carried_BE = drafter.run(
                    carried_BE[:, None], tokens[-1][:, None], anchor_B1 + depth, used=state.used
                )[:, 0]
            picked_B, top_B, probs_BW = chooser.pick_scored(drafter.logits(carried_BE))
            tokens.append(self.selected_W[picked_B])
            tops.append(top_B)
            if probs_BW is not None:
                probs.append(probs_BW)
        token_BN = torch.stack(tokens, 1)
        if probs:
            return Proposal(token_BN, probs_BNW=torch.stack(probs, 1))
        return Proposal(tokens_of(token_BN, torch.stack(tops, 1)))
