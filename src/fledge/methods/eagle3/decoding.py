"""EAGLE-3's strategy: one token after another, each from the draft's own last state and token."""

from collections.abc import Sequence

from torch import Tensor

from fledge.decode.accept import Chooser, Proposal
from fledge.decode.drafter import UnrolledStrategy
from fledge.decode.strategy import Rollouts, RoundState
from fledge.rollout.plan import RolloutPlan


class ChainRollouts(Rollouts):
    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        states: list[Tensor] = self.draft.unroll(aux_TD, ids_T, plan, compute_dtype=self.dtype)
        return states


class Chain(UnrolledStrategy):
    drafted = "chain"
    rollouts = ChainRollouts

    @property
    def label(self) -> str:
        return f"a chain of k = {self.count} drafted tokens"

    @property
    def slots(self) -> int:
        return self.count + 1

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        carried_BE = self.extend(state)
        anchor_B1 = state.anchor_B[:, None]
        steps: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for depth in range(self.count):
            if depth > 0:
                token_B1 = steps[-1][0][:, None]
                carried_BE = self.run(
                    carried_BE[:, None], token_B1, anchor_B1 + depth, used=state.used
                )[:, 0]
            picked_B, top_B, probs_BW = chooser.pick(self.logits(carried_BE))
            steps.append((self.selected_W[picked_B], top_B, probs_BW))
        return Proposal.stacked(steps)
