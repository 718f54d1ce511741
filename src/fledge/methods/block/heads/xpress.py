"""XPress (arXiv 2608.02438): parallel passes refine all tokens of a block, each reading all before.

    u_s = in_proj [down_h h_s ; down_g mean of h ; token_embed previous_s]
    v_s = u_s + sum_{j <= s} mix_l[:, s, j] * u_j
    logits_s += readout (v_s + mlp_down(silu(mlp_gate v_s) * mlp_up v_s))

for all slots of a block, the first included, whose previous token is the block's own first token,
as vLLM serves it. Decoding starts from the likeliest plain tokens and repeats: the previous tokens
are those of the last pass. The loss charges the text's previous tokens, `rounds` such passes and
the plain logits; each is 0.1 CE with the target's top token + 0.9 (1 - acceptance), up to the first
token of a block that is not supervised. A new draft starts with readout = 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.head import HeadLike
from fledge.core.products import matmul
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.strategy import RoundState
from fledge.methods.block.config import BlockConfig
from fledge.methods.block.decoding import Block, BlockRollouts, BlockTree, newest, places
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.heads.base import TokenHead, cast_linear
from fledge.methods.block.objective import BlockTrainerModule
from fledge.methods.block.plan import BlockPlan
from fledge.methods.losses.hard import HardCrossEntropy
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.head_loss import HeadLoss, HeadTask, TokenTask, frozen_head_loss
from fledge.methods.shared.objective import StepOptions, StepTotals
from fledge.methods.shared.rollout_objective import ReadyBatch
from fledge.methods.shared.supervision import VocabularyTensors
from fledge.rollout.attention import AttentionKind
from fledge.rollout.plan import RolloutPlan

TEXT_WEIGHT, DISTANCE_WEIGHT = 0.1, 0.45  # 0.9 of half the distance between the distributions
MLP_RATIO = 2  # all trainers have this one
_SCORES = 2**24  # logits of blocks that are refined together


class XPressHead(TokenHead):
    whole_blocks: ClassVar[bool] = True

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, slots, width = config.markov_rank, config.size, config.markov_rank * MLP_RATIO
        self.first_place = config.first_place
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, slots, slots))
        self.mlp_gate = nn.Linear(rank, width, bias=False)
        self.mlp_up = nn.Linear(rank, width, bias=False)
        self.mlp_down = nn.Linear(width, rank, bias=False)
        self.readout = nn.Linear(rank, config.draft_vocab_size, bias=False)

    @property
    def out_WR(self) -> Tensor:  # noqa: N802  (its shape)
        return self.readout.weight

    def start(self) -> None:
        super().start()
        nn.init.zeros_(self.mix_l)

    def features(self, token_NK: Tensor, state_NJE: Tensor) -> Tensor:
        """[N, K, R] features of the drafting slots, given the tokens before them: the block's
        first, and those that are drafted after it."""
        previous_NJ = torch.cat([token_NK[:, :1].expand(-1, self.first_place), token_NK], dim=1)
        token_NJR = F.embedding(previous_NJ, self.token_embed.weight).to(state_NJE.dtype)
        mean_N1R = cast_linear(self.down_g, state_NJE.mean(1, keepdim=True))
        parts = [cast_linear(self.down_h, state_NJE), mean_N1R.expand_as(token_NJR), token_NJR]
        u_NJR = cast_linear(self.in_proj, torch.cat(parts, dim=-1))
        mix_RJJ = self.mix_l.to(state_NJE.dtype).tril()
        v_NJR = u_NJR + torch.einsum("rsj,njr->nsr", mix_RJJ, u_NJR)
        gated = F.silu(cast_linear(self.mlp_gate, v_NJR)) * cast_linear(self.mlp_up, v_NJR)
        return (v_NJR + cast_linear(self.mlp_down, gated))[:, self.first_place :]


def xpress_head(draft: BlockDraftModel) -> XPressHead:
    assert isinstance(draft.token_head, XPressHead)
    return draft.token_head


# --- objective -----------------------------------------------------------------------------------


class XPressTrainerModule(BlockTrainerModule):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`."""

    # a round reads the tokens of the one before, which are computed where they are charged
    contiguous: ClassVar[bool] = True

    def __init__(
        self,
        draft_model: BlockDraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        target_head: HeadLike | None = None,
        rounds: int = 3,
        round_weight: float = 0.3,
        plain_weight: float = 0.6,
        anchors: int = 512,
        gamma: float = 4.0,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
    ) -> None:
        if not isinstance(draft_model.token_head, XPressHead):
            raise ValueError("token_head: the draft was built without XPress's")
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention)
        super().__init__(
            draft_model, vocabulary, HardCrossEntropy(), options, anchors=anchors, gamma=gamma
        )
        self.rounds, self.round_weight = rounds, round_weight
        self.plain_weight = plain_weight

    def _score(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,
        totals: StepTotals,
    ) -> HeadLoss:
        draft, plan, head = self.draft_model, ready.plan, xpress_head(self.draft_model)
        state_NJE = torch.unflatten(hidden_PE, 0, (-1, draft.spec.size))
        scored = TokenTask(
            task.elements, None, TEXT_WEIGHT, DISTANCE_WEIGHT, ready.supervision, self.chunk_rows
        )
        weight_N = torch.where(task.charged_N, coefficient_N, 0.0)
        block_N, text_BK = self._block_of(plan), self._block_tokens(ready)
        depth_N = plan.head.depth_N

        def loss(token_BK: Tensor, weight: float, *, plain: float = 0.0, picks: bool) -> HeadLoss:
            features_NR = head.features(token_BK, state_NJE)[block_N, depth_N]
            return frozen_head_loss(
                hidden_PE, draft.lm_head.weight, scored, coefficient_N=weight * weight_N,
                plain_N=plain * weight_N if plain else None, picks=picks,
                token=(features_NR, head.out_WR),
            )  # fmt: skip

        scores = loss(text_BK, 1.0, plain=self.plain_weight, picks=False)
        total = scores.loss
        pick_N = self._plain_picks(hidden_PE, task) if self.rounds else None
        for number in range(self.rounds):
            assert pick_N is not None
            token_BX = F.pad(text_BK, (0, 1))  # what follows the last token is dropped again
            token_BX[block_N, depth_N + 1] = self.selected_token_ids[pick_N]
            last = number == self.rounds - 1
            one = loss(token_BX[:, :-1], self.round_weight / self.rounds, picks=not last)
            total, pick_N = total + one.loss, one.pick_N
        return replace(scores, loss=total)

    @torch.no_grad()
    def _plain_picks(self, hidden_PE: Tensor, task: HeadTask) -> Tensor:
        """[N] the likeliest tokens of the plain logits, as draft ids."""
        head_WE = self.draft_model.lm_head.weight.to(hidden_PE.dtype)
        rows = task.rows_of_chunk(hidden_PE, len(head_WE))
        parts = torch.split(task.elements.element_N, rows)
        return torch.cat([matmul(hidden_PE[part], head_WE.t()).argmax(-1) for part in parts])


# --- decoding ------------------------------------------------------------------------------------


class PassRollouts(BlockRollouts):
    """The block from every slot with all its passes, which do not depend on the text either. Head
    inputs hold the state and the features of the last pass."""

    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        assert isinstance(plan, BlockPlan)
        newest_N = ids_T.index_select(0, plan.blocks.slot_N)
        parts = [
            torch.cat([state_NJE[:, self.draft.spec.first_place :], features_NKR], dim=-1)
            for state_NJE, token_N, _ in self._blocks(aux_TD, newest_N, plan)
            for features_NKR in [refined(self.draft, state_NJE, token_N)]
        ]
        block_P, depth_P = places(plan, self.draft)
        return plan.by_depth(torch.cat(parts)[block_P, depth_P])

    def logits(self, head_input_NE: Tensor) -> Tensor:
        state_NE, features_NR = head_input_NE.tensor_split([self.draft.spec.hidden_size], dim=1)
        out_WR = xpress_head(self.draft).out_WR.to(state_NE.dtype)
        return super().logits(state_NE) + F.linear(features_NR, out_WR)


@torch.no_grad()
def refined(draft: BlockDraftModel, state_NJE: Tensor, newest_N: Tensor) -> Tensor:
    """[N, K, R] the features of the last pass."""
    step = max(1, _SCORES // (state_NJE.shape[1] * draft.spec.draft_vocab_size))
    parts = zip(torch.split(state_NJE, step), torch.split(newest_N, step), strict=True)
    return torch.cat([_refined(draft, *part) for part in parts])


def _refined(draft: BlockDraftModel, state_NJE: Tensor, newest_N: Tensor) -> Tensor:
    head, dtype, selected_W = xpress_head(draft), state_NJE.dtype, draft.selected_token_ids
    head_WE, out_WR = draft.lm_head.weight.to(dtype), head.out_WR.to(dtype)
    assert selected_W is not None
    plain_NKW = F.linear(state_NJE[:, draft.spec.first_place :], head_WE)
    features_NKR = plain_NKW.new_zeros(*plain_NKW.shape[:2], out_WR.shape[1])
    logits_NKW = plain_NKW
    for _ in range(draft.spec.num_jacobi_passes):
        picked_NK = selected_W[logits_NKW.argmax(-1)]
        token_NK = torch.cat([newest_N[:, None], picked_NK[:, :-1]], dim=1)
        features_NKR = head.features(token_NK, state_NJE)
        logits_NKW = plain_NKW + F.linear(features_NKR, out_WR)
    return features_NKR


class Passes(Block):
    """A block whose tokens are refined by parallel passes. With sampling, the passes are greedy and
    the tokens are drawn from the last one's logits."""

    drafted = "block, refined"
    rollouts = PassRollouts

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        return super().fits(draft) and isinstance(draft.token_head, XPressHead)

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        logits_BKW = pass_logits(self, state)
        picked_BN, top_BN, probs_BNW = chooser.pick(logits_BKW[:, : self.count])
        return Proposal.picked(self.selected_W[picked_BN], top_BN, probs_BNW)


class PassTree(BlockTree):
    """The same for the logits of the last pass."""

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        return Passes.fits(draft)

    def block_logits(self, state: RoundState) -> Tensor:
        return pass_logits(self, state)[:, : self.reach]


def pass_logits(strategy: Block, state: RoundState) -> Tensor:
    """[B, K, W] the logits of the last pass."""
    draft, dtype = strategy.draft, strategy.dtype
    strategy.take_in(state.aux_BQD, state.start_B)
    state_BJE = strategy.run_block(newest(state), state.length_B, used=state.used)
    features_BKR = refined(draft, state_BJE, newest(state))
    plain_BKW = F.linear(state_BJE[:, draft.spec.first_place :], strategy.head_WE)
    return plain_BKW + F.linear(features_BKR, xpress_head(draft).out_WR.to(dtype))
