"""What candidate heads share: how candidates are found, the walk through them, the objective.

A walk starts at the block's first token. At every depth it takes the candidate with the best score
given the one before, or draws one from softmax(scores / temperature), which is then the draft's
distribution. Replay reads the text's tokens as those before: up to the first miss these are the
walk's own. Shapes: N blocks, K depths, C candidates.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.distributed import World
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.strategy import RoundState
from fledge.methods.block.decoding import Block, BlockRollouts, newest, places
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.heads.base import BlockCandidates, CandidateHead, at_least_fp32
from fledge.methods.block.objective import DFlashTrainerModule
from fledge.methods.block.plan import BlockPlan
from fledge.methods.shared.best_tokens import Candidates
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.head_loss import HeadLoss, HeadTask
from fledge.methods.shared.objective import StepTotals
from fledge.methods.shared.rollout_objective import ReadyBatch, no_autocast
from fledge.rollout.plan import RolloutPlan

_SCORES = 2**24  # logits of blocks that are searched together


def candidate_head(draft: BlockDraftModel) -> CandidateHead:
    head = draft.candidate_head
    assert head is not None, "fits: the draft has a candidate head"
    return head


@torch.no_grad()
def find(
    draft: BlockDraftModel, state_NKE: Tensor, newest_N: Tensor, context_NE: Tensor | None
) -> BlockCandidates:
    """The candidates of whole blocks."""
    head, dtype = candidate_head(draft), state_NKE.dtype
    selected_W, head_WE = draft.selected_token_ids, draft.lm_head.weight.to(dtype)
    assert selected_W is not None
    step = max(1, _SCORES // (state_NKE.shape[1] * len(head_WE)))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in torch.split(state_NKE, step):
        logits_NKW = F.linear(part, head_WE).to(at_least_fp32(dtype))
        top = logits_NKW.topk(head.count, dim=-1)
        lse = logits_NKW.logsumexp(-1) if head.reads_normalizer else top.values[..., 0]
        found.append((selected_W[top.indices], top.values, lse))
    ids, values, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    normalizer = lse if head.reads_normalizer else None
    return BlockCandidates(ids, values, normalizer, state_NKE, context_NE, newest_N)


class WalkRollouts(BlockRollouts):
    """The walk from every slot, given the text. Head inputs hold each depth's candidates and their
    scores, in at least float32, which holds every token id exactly."""

    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        assert isinstance(plan, BlockPlan)
        draft, first = self.draft, self.draft.spec.first_place
        newest_N = ids_T.index_select(0, plan.blocks.slot_N)
        text_NK = self._text(ids_T, plan)
        inputs, begin = [], 0
        for state_NJE, token_N, rows in self._blocks(aux_TD, newest_N, plan):
            context_NE = None
            if candidate_head(draft).reads_context:
                aux_ND = aux_TD.index_select(0, rows.slot_N)
                context_NE = draft.project_hidden_states(aux_ND, self.dtype)
            found = find(draft, state_NJE[:, first:], token_N, context_NE)
            before_NK1 = text_NK[begin : begin + len(rows), 1:, None]
            scores = along_text(*scores_of(draft, found), found.id_NKC[:, :-1] == before_NK1)
            inputs.append(torch.cat([found.id_NKC.to(scores.dtype), scores], dim=-1))
            begin += len(rows)
        block_P, depth_P = places(plan, draft)
        return plan.by_depth(torch.cat(inputs)[block_P, depth_P])

    def _text(self, ids_T: Tensor, plan: BlockPlan) -> Tensor:
        """[N, K] the text's tokens before each depth."""
        depth_K = torch.arange(self.draft.spec.drafts, device=ids_T.device)
        return ids_T[(plan.blocks.slot_N[:, None] + depth_K).clamp_max(len(ids_T) - 1)]

    def logits(self, head_input_NE: Tensor) -> Tensor:
        """[N, W]: the scores, and minus infinity for all other tokens."""
        id_NC, score_NC = head_input_NE.chunk(2, dim=1)
        selected_W = self.selected_token_ids
        index_NC = torch.searchsorted(selected_W, id_NC.long().contiguous())
        shape = (len(head_input_NE), len(selected_W))
        return score_NC.new_full(shape, -torch.inf).scatter_(1, index_NC, score_NC)


def scores_of(draft: BlockDraftModel, found: BlockCandidates) -> tuple[Tensor, Tensor]:
    embed = partial(draft.embed, dtype=found.state_NKE.dtype)
    return candidate_head(draft).scores(found, embed)


def along_text(first_NC: Tensor, pair_NKCC: Tensor, text_NKC: Tensor) -> Tensor:
    """[N, K, C] the candidates' scores, each depth given the text's token before it: `text_NKC`
    marks it among the candidates of all depths but the last. Where it is none of them, the walk has
    left the text already and the scores mean nothing."""
    before_NK = text_NKC.to(torch.int8).argmax(-1)
    index = before_NK[..., None, None].expand(-1, -1, 1, first_NC.shape[1])
    later_NKC = pair_NKCC.gather(2, index).squeeze(2)
    return torch.cat([first_NC[:, None], later_NKC], dim=1)


class Walk(Block):
    """A walk through the best tokens of every slot."""

    drafted = "block, walked"
    rollouts = WalkRollouts

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        has_head = isinstance(draft, BlockDraftModel) and draft.candidate_head is not None
        return super().fits(draft) and has_head

    def lattice(self, state: RoundState) -> tuple[BlockCandidates, Tensor, Tensor]:
        """The candidates of all slots, and the scores of the first and of pairs."""
        draft, head, first = self.draft, candidate_head(self.draft), self.draft.spec.first_place
        self.take_in(state.aux_BQD, state.start_B)
        state_BJE = self.run_block(newest(state), state.length_B, used=state.used)
        context_BE = None
        if head.reads_context:
            rows_B = torch.arange(len(state_BJE), device=self.device)
            last_BD = state.aux_BQD[rows_B, state.count_B - 1]
            context_BE = draft.project_hidden_states(last_BD, self.dtype)
        found = find(draft, state_BJE[:, first:], newest(state), context_BE)
        return found, *scores_of(draft, found)

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        found, score_BC, pair_BKCC = self.lattice(state)
        rows_B = torch.arange(len(score_BC), device=self.device)
        steps: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for depth in range(self.count):
            id_BC = found.id_NKC[:, depth].contiguous()
            index_B, top_B, probs_BC = chooser.pick(score_BC)
            probs_BW = None
            if probs_BC is not None:
                column_BC = torch.searchsorted(self.selected_W, id_BC)
                probs_BW = probs_BC.new_zeros(len(id_BC), len(self.selected_W))
                probs_BW.scatter_(1, column_BC, probs_BC)
            steps.append((id_BC[rows_B, index_B], top_B, probs_BW))
            if depth + 1 < self.count:
                score_BC = pair_BKCC[rows_B, depth, index_B]
        return Proposal.stacked(steps)


# --- objective -----------------------------------------------------------------------------------


class CandidateTrainerModule(DFlashTrainerModule):
    """DFlash's objective, and the head's own loss. That may be a mean over slots whose right tokens
    are candidates (`counts_found`): then it depends on the whole step, as with D-PACE."""

    counts_found: bool = True

    @torch.no_grad()
    def totals(self, ready: Sequence[ReadyBatch[BlockPlan]], world: World) -> StepTotals | None:
        """As in the base class; and the weight of these slots over all micro-batches and ranks,
        which also takes an extra forward pass of the draft."""
        totals = super().totals(ready, world)
        if not self.counts_found or (len(ready) <= 1 and world.size == 1):
            return totals
        device = self.selected_token_ids.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        with no_autocast(device.type) as autocast_dtype:
            for batch in ready:
                hidden_PE, task = self._hidden(batch, autocast_dtype), self._head_task(batch)
                weight_N = self._depth_weights(hidden_PE.dtype)[batch.plan.head.depth_N]
                scores = super()._score(batch, task, hidden_PE, weight_N, StepTotals())
                assert scores.candidates is not None
                _, weight = self._choose(batch, task, hidden_PE, scores.candidates, weight_N)
                assert weight is not None
                total += weight.double()
        return replace(totals or StepTotals(), found_sum=world.sum_(total))

    def _score(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,
        totals: StepTotals,
    ) -> HeadLoss:
        scores = super()._score(ready, task, hidden_PE, coefficient_N, totals)
        assert scores.candidates is not None
        if self.counts_found:
            coefficient_N = self._depth_weights(hidden_PE.dtype)[task.elements.depth_N]
        loss, weight = self._choose(ready, task, hidden_PE, scores.candidates, coefficient_N)
        if weight is not None:
            weight = weight if totals.found_sum is None else totals.found_sum
            loss = loss / weight.where(weight > 0, 1.0).to(loss.dtype)
        return replace(scores, loss=scores.loss + loss)

    @abstractmethod
    def _choose(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        found: Candidates,
        coefficient_N: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The head's summed loss, and what it is to be divided by; None: the coefficients are."""
