"""P-EAGLE's strategy: all tokens of a round in one pass, from a learned placeholder."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fledge.core.rows import TokenBatch
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.drafter import UnrolledStrategy
from fledge.decode.strategy import Rollouts, RoundState, drafting_slots
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.peagle.draft import unroll_parallel
from fledge.methods.peagle.plan import ParallelPlan, lay_out_parallel
from fledge.methods.shared.draft import DraftModel
from fledge.rollout.plan import RolloutPlan
from fledge.rollout.slots import RowMasks, flatten_slots


class ParallelRollouts(Rollouts):
    def plan(self, tokens: TokenBatch) -> ParallelPlan:
        slots = flatten_slots(RowMasks.of(tokens, drafting_slots(tokens)))
        deepest_S = np.where(slots.target, run_lengths(slots.target) - 1, 0)
        deepest_S = np.minimum(deepest_S, min(self.depths, len(deepest_S)) - 1)
        return lay_out_parallel(slots, deepest_S, self.depths, device=self.draft.device)

    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        assert isinstance(plan, ParallelPlan)
        states = unroll_parallel(self.draft, aux_TD, ids_T, plan, compute_dtype=self.dtype)
        return plan.by_depth(states)


class Parallel(UnrolledStrategy):
    drafted = "tokens in parallel"
    rollouts = ParallelRollouts
    draft: LlamaEagle3DraftModel

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        return super().fits(draft) and draft.spec.has_mask

    @property
    def label(self) -> str:
        return f"k = {self.count} tokens drafted in parallel"

    @property
    def slots(self) -> int:
        return 2 * self.count

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        """Run the verified slots and `count` - 1 mask slots after them.

        Rows differ in how many slots were verified: a shorter row simply has more mask slots, whose
        surplus comes after everything that is read, and is overwritten.
        """
        draft, device, num_masks = self.draft, self.device, self.count - 1
        batch, width = state.token_BQ.shape
        place_Q = torch.arange(width + num_masks, device=device)
        count_B1 = state.count_B[:, None]
        real_BQ = place_Q < count_B1
        token_BQ = F.pad(state.token_BQ, (0, num_masks)).masked_fill(~real_BQ, draft.spec.mask_id)
        placeholder_11E = draft.project_hidden_states(draft.mask_hidden, self.dtype)
        true_BQE = draft.project_hidden_states(state.aux_BQD, self.dtype)
        state_BQE = F.pad(true_BQE, (0, 0, 0, num_masks)).where(real_BQ[..., None], placeholder_11E)
        index_BQ = state.start_B[:, None] + place_Q
        state_BQE = self.run(state_BQE, token_BQ, index_BQ, used=state.used)
        rows_B1 = torch.arange(batch, device=device)[:, None]
        proposing_BN = count_B1 - 1 + torch.arange(self.count, device=device)
        logits_BNW = self.logits(state_BQE[rows_B1, proposing_BN])
        picked_BN, top_BN, probs_BNW = chooser.pick(logits_BNW)
        return Proposal.picked(self.selected_W[picked_BN], top_BN, probs_BNW)


def run_lengths(marked_S: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[S]: the number of consecutive marked slots from each slot on.

    Example: 1 1 0 1 -> 2 1 0 1
    """
    index = np.arange(len(marked_S), dtype=np.int64)
    gap = np.where(marked_S, len(marked_S), index)
    next_gap: NDArray[np.int64] = np.minimum.accumulate(gap[::-1])[::-1]
    return next_gap - index
