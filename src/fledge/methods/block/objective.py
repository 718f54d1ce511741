"""What the objectives of block drafts share: how blocks are sampled, run and scored.

The interface is that of `RolloutTrainerModule`; docs/semantics.md has the rules. Depth k of
a rollout is the k-th token that a block proposes. The weight of an element falls with its depth;
the loss is divided by the sum of the weights of all elements, over all micro-batches and ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.distributed import World
from fledge.core.head import HeadLike
from fledge.methods.block.draft import BlockDraftModel, step_head
from fledge.methods.block.plan import ANCHOR_TOKENS, BlockPlan, plan_blocks
from fledge.methods.losses.base import Loss
from fledge.methods.losses.hard import TextCrossEntropy
from fledge.methods.losses.registry import loss_of
from fledge.methods.shared.best_tokens import TopTokens
from fledge.methods.shared.head_loss import (
    HeadLoss,
    HeadTask,
    TokenTask,
    frozen_head_loss,
    head_loss,
)
from fledge.methods.shared.objective import StepOptions, StepTotals
from fledge.methods.shared.rollout_objective import ReadyBatch, RolloutTrainerModule, no_autocast
from fledge.methods.shared.supervision import Supervision, VocabularyTensors
from fledge.rollout.attention import AttentionKind
from fledge.rollout.plan import HeadElements
from fledge.rollout.slots import RowMasks


class BlockTrainerModule(RolloutTrainerModule[BlockPlan]):
    """A block draft and its objective; call it with `**batch.to_trainer_inputs()`.

    `seed` (an argument of `prepare` and of the call) determines where blocks start. Without one, a
    draft in training mode draws a seed from torch's generator, and a draft in evaluation mode uses
    the same blocks every time.
    """

    draft_model: BlockDraftModel

    def __init__(
        self,
        draft_model: BlockDraftModel,
        vocabulary: VocabularyTensors,
        loss: Loss,
        options: StepOptions,
        *,
        anchors: int,
        gamma: float,
    ) -> None:
        for name, value in (("anchors", anchors), ("gamma", gamma)):
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name}: must be positive, got {value!r}")
        super().__init__(draft_model, vocabulary, loss, options)
        head = self.target_head
        if head is not None and (
            head.bias_V is not None or head.softcap is not None or head.scale != head.divisor
        ):
            raise ValueError(
                "target_head: it has a bias, a scale or a soft cap, and block drafts read the "
                "target's head without one; use eagle3"
            )
        self.depths, self.anchors, self.gamma = draft_model.spec.drafts, anchors, gamma
        # the draft id of every target token; 0 for tokens outside the draft vocabulary
        draft_id_V = torch.zeros(len(self.selected_token_mask), dtype=torch.int64)
        draft_id_V[vocabulary.ids_W.cpu()] = torch.arange(len(vocabulary.ids_W))
        self.draft_id_V: Tensor
        self.register_buffer("draft_id_V", draft_id_V.to(draft_model.device), persistent=False)

    # --- what an objective defines --------------------------------------------------------------

    contiguous: ClassVar[bool] = False
    """Whether a block is charged only up to its first token that is not supervised."""

    @property
    def _by_text(self) -> bool:
        """Whether elements are scored against the text's token. Then an element is covered if that
        token is in the draft vocabulary; otherwise, if the target's top token is."""
        return isinstance(self.loss, TextCrossEntropy)

    @property
    def reads_target(self) -> bool:
        """Whether the loss reads the target's distribution, and not only the text."""
        return not self._by_text

    # --- how a block draft is trained -----------------------------------------------------------

    @property
    def _num_losses(self) -> int:
        return 1  # one mean acceptance over all elements

    def plan(self, masks: RowMasks, seed: int | None = None) -> BlockPlan:
        return plan_blocks(
            masks,
            place=self.draft_model.spec.place,
            anchors=self.anchors,
            contiguous=self.contiguous,
            seed=self._seed(seed),
            device=self.selected_token_ids.device,
            quantum=self.quantum if self.draft_model.training else 0,
            share_targets=self.reads_target,
        )

    @property
    def can_be_even(self) -> bool:
        return True

    def quantum_for(self, tokens: int, *, sizes: int) -> int:
        """The number of blocks is proportional to the number of tokens, so most batches have about
        as many, and sizes recur even with a quantum half as large."""
        blocks = min(tokens, tokens * self.anchors // ANCHOR_TOKENS)
        return max(8, blocks // (2 * sizes))

    def _covered(self, plan: BlockPlan, input_ids_BT: Tensor, supervision: Supervision) -> Tensor:
        if not self._by_text:
            return supervision.coverage()
        return self.selected_token_mask[_next_tokens(input_ids_BT, plan.target_M)]

    def _states(
        self, plan: BlockPlan, aux_TD: Tensor, input_ids_T: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        newest_N = input_ids_T.index_select(0, plan.blocks.slot_N)
        states_PE: Tensor = self.draft_model(
            aux_TD,
            newest_N,
            plan.position_T,
            plan.blocks,
            wanted_P=None if self.draft_model.reads_blocks else plan.element_P,
            compute_dtype=dtype,
            attention=self.attention,
        )
        return states_PE.flatten(0, -2)

    def _head_task(self, ready: ReadyBatch[BlockPlan]) -> HeadTask:
        """As in the base class; for a head that reads whole blocks, the states are those of all
        slots."""
        task, plan = super()._head_task(ready), ready.plan
        if not self.draft_model.reads_blocks:
            return task
        element_N = plan.element_P.index_select(0, plan.head.element_N)
        return replace(task, elements=replace(plan.head, element_N=element_N))

    def _charged(self, covered_N: Tensor) -> Tensor:
        """Only covered elements."""
        return covered_N

    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        """exp(-k / gamma), divided by the summed weights of all charged elements of the step."""
        weight_K = self._depth_weights(dtype)
        total = (weight_K * count_K).sum()
        return weight_K / total.where(total > 0, 1.0)

    def _depth_weights(self, dtype: torch.dtype) -> Tensor:
        """[K] exp(-k / gamma)"""
        wide = torch.promote_types(dtype, torch.float32)
        depth_K = torch.arange(self.depths, device=self.selected_token_ids.device, dtype=wide)
        return (-depth_K / self.gamma).exp()

    def _labels(self, ready: ReadyBatch[BlockPlan]) -> Tensor:
        """[N] the text's tokens that the elements predict, as draft ids."""
        label_M = self.draft_id_V[_next_tokens(ready.input_ids, ready.plan.target_M)]
        return label_M.index_select(0, ready.plan.head.target_N)

    def _previous_tokens(self, ready: ReadyBatch[BlockPlan]) -> Tensor:
        """[N] the text's tokens before those that the elements predict, as target ids."""
        slot_N = ready.plan.target_M.index_select(0, ready.plan.head.target_N)
        return ready.input_ids.flatten().index_select(0, slot_N)

    # --- through a token head -------------------------------------------------------------------

    def _token_features(
        self, ready: ReadyBatch[BlockPlan], elements: HeadElements, state_NE: Tensor
    ) -> Tensor:
        """[N, R] the features of a token head that drafts left to right, given the text."""
        head = step_head(self.draft_model)
        memory_NM = self._memory(ready, state_NE.dtype) if head.has_memory else None
        features_NR = head.features(self._previous_tokens(ready), state_NE, memory_NM)
        if head.first_depth:
            features_NR = features_NR * (elements.depth_N >= head.first_depth)[:, None]
        return features_NR

    def _memory(self, ready: ReadyBatch[BlockPlan], dtype: torch.dtype) -> Tensor:
        """[N, M] the token head's memory of each block up to the token before the predicted one."""
        draft, head, memory_BM = self.draft_model, step_head(self.draft_model), None
        ids_S = ready.input_ids.flatten()  # blocks share tokens, and so what is read of them
        inputs_SX, steps = head.inputs(draft.embed(ids_S, dtype)), []
        for slot_B in self._block_slots(ready).unbind(1):
            memory_BM = head.remember(memory_BM, inputs_SX.index_select(0, slot_B))
            steps.append(memory_BM)
        return torch.stack(steps)[ready.plan.head.depth_N, self._block_of(ready.plan)]

    def _block_slots(self, ready: ReadyBatch[BlockPlan]) -> Tensor:
        """[B, K] the slots that hold the tokens before those that each block predicts. Tokens
        beyond a document change only what is not charged."""
        slot_B = ready.plan.slot_T[ready.plan.blocks.slot_N]
        slot_BK = slot_B[:, None] + torch.arange(self.depths, device=slot_B.device)
        return slot_BK.clamp_max(ready.input_ids.numel() - 1)

    def _block_tokens(self, ready: ReadyBatch[BlockPlan]) -> Tensor:
        """[B, K] the tokens there."""
        return ready.input_ids.flatten()[self._block_slots(ready)]

    def _block_of(self, plan: BlockPlan) -> Tensor:
        """[N] the block of each element."""
        block_N = plan.element_P.index_select(0, plan.head.element_N)
        return block_N // self.draft_model.spec.size


def _next_tokens(input_ids_BT: Tensor, slot_M: Tensor) -> Tensor:
    """The token after the one that each slot reads: documents are contiguous, so it is in the next
    place. The last slot has no next token, and is never among `slot_M`."""
    return input_ids_BT.flatten().roll(-1).index_select(0, slot_M)


# --- dflash objective ----------------------------------------------------------------------------
# DFlash's objective: every token of a block against the text or the target's distribution.
#
# Weights decay with depth (`gamma`) or follow D-PACE (arXiv 2605.18810): with q_k the probability
# that the draft gives to the text's token at depth k, and s_k = (1 + q_k) / 2, the weight of
# depth k is the sum over m >= k of s_0 s_1 ... s_m: roughly how many tokens are lost if it is
# wrong.


class DFlashTrainerModule(BlockTrainerModule):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`.

    `loss` is "text" (cross entropy with the text's token), or, against the target's distribution, a
    `Loss` or its name in `losses.registry`.
    """

    def __init__(
        self,
        draft_model: BlockDraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        target_head: HeadLike | None = None,
        loss: str | Loss = "text",
        weights: Literal["decay", "dpace"] = "decay",
        anchors: int = 512,
        gamma: float = 7.0,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
    ) -> None:
        chosen = TextCrossEntropy() if loss == "text" else loss_of(loss)
        if weights not in ("decay", "dpace"):
            raise ValueError(f"weights: 'decay' or 'dpace', got {weights!r}")
        if weights == "dpace" and not isinstance(chosen, TextCrossEntropy):
            raise ValueError(f"weights: 'dpace' needs the loss 'text', got {chosen.kind!r}")
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention)
        super().__init__(draft_model, vocabulary, chosen, options, anchors=anchors, gamma=gamma)
        self.weights = weights
        self.top: TopTokens | None = None  # what a head on top of it chooses among

    @torch.no_grad()
    def totals(self, ready: Sequence[ReadyBatch[BlockPlan]], world: World) -> StepTotals | None:
        """As in the base class; for D-PACE, the sum of all weights over micro-batches and ranks,
        which also takes an extra forward pass of the draft."""
        if self.weights != "dpace":
            return super().totals(ready, world)
        if len(ready) <= 1 and world.size == 1:
            return None
        device = self.selected_token_ids.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        with no_autocast(device.type) as autocast_dtype:
            for batch in ready:
                hidden_PE = self._hidden(batch, autocast_dtype)
                scores = self._text_scores(batch, hidden_PE)
                total += scores.coefficient_N.sum().double()
        return StepTotals(weight_sum=world.sum_(total))

    def _score(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,
        totals: StepTotals,
    ) -> HeadLoss:
        if not self._by_text:
            return head_loss(
                hidden_PE,
                self.draft_model.lm_head.weight,
                task,
                coefficient_N=coefficient_N,
                acceptance_L=totals.acceptance_L,
                top=self.top,
            )
        if self.weights == "decay":
            weight_N = torch.where(task.charged_N, coefficient_N, 0.0)
            return self._text_scores(ready, hidden_PE, weight_N)
        scores = self._text_scores(ready, hidden_PE)
        total = scores.coefficient_N.sum() if totals.weight_sum is None else totals.weight_sum
        total = total.where(total > 0, 1.0).to(scores.loss.dtype)
        return replace(scores, loss=scores.loss / total)

    def _text_scores(
        self,
        ready: ReadyBatch[BlockPlan],
        hidden_PE: Tensor,
        coefficient_N: Tensor | None = None,  # None: D-PACE's, not yet divided by their sum
    ) -> HeadLoss:
        plan = ready.plan
        charged_N = self._charged_elements(plan, ready.covered_M)
        weigh = partial(dpace_weights, plan, charged_N=charged_N)
        return frozen_head_loss(
            hidden_PE,
            self.draft_model.lm_head.weight,
            TokenTask(
                plan.head,
                self._labels(ready),
                supervision=ready.supervision,
                chunk_rows=self.chunk_rows,
            ),
            coefficient_N=coefficient_N,
            weigh=weigh if coefficient_N is None else None,
            top=self.top,
        )


def dpace_weights(plan: BlockPlan, row_loss_N: Tensor, charged_N: Tensor) -> Tensor:
    """[N] weights from the cross entropies of a plan's elements; 0 for elements not charged."""
    element_N, blocks = plan.head.element_N, plan.counts[0]

    def by_block(values_P: Tensor) -> Tensor:  # [K, blocks]; 0 beyond the depth of a block
        return torch.stack(
            [F.pad(part, (0, blocks - len(part))) for part in plan.by_depth(values_P)]
        )

    charged_P = torch.zeros_like(plan.supervised_P)
    charged_P[element_N] = charged_N
    smooth_P = torch.ones_like(charged_P, dtype=row_loss_N.dtype)
    smooth_P[element_N] = torch.where(charged_N, 0.5 * (-row_loss_N).exp() + 0.5, 1.0)
    product_KB = by_block(smooth_P).cumprod(0) * by_block(charged_P)
    weight_KB = product_KB.flip(0).cumsum(0).flip(0)
    weight_P = torch.cat([row[:count] for row, count in zip(weight_KB, plan.counts, strict=True)])
    return torch.where(charged_N, weight_P[element_N], 0.0)


# --- dspark objective ----------------------------------------------------------------------------
# DSpark's objective: three terms on a block in which each token depends on the one before it.
#
#     text_weight * CE with the text's token + distance_weight * |q - p|
#         + confidence_weight * BCE of the confidence towards 1 - |q - p| / 2
#
# at every token of a block up to the first that is not supervised. q is softmax(head(state) +
# token head(previous token)); in training the previous token is the text's. 1 - |q - p| / 2 is
# the probability that the token is accepted; no gradient flows through it.


class DSparkTrainerModule(BlockTrainerModule):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`."""

    def __init__(
        self,
        draft_model: BlockDraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        target_head: HeadLike | None = None,
        text_weight: float = 0.1,
        distance_weight: float = 0.9,
        confidence_weight: float = 1.0,
        anchors: int = 512,
        gamma: float = 4.0,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
    ) -> None:
        if draft_model.token_head is None:
            raise ValueError("markov_rank: the draft was built without a token head")
        if confidence_weight > 0 and draft_model.confidence_head is None:
            raise ValueError("confidence_head: the draft was built without one")
        if confidence_weight > 0 and distance_weight == 0:
            raise ValueError("confidence_weight: learns from the distance; give that a weight too")
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention)
        super().__init__(
            draft_model, vocabulary, TextCrossEntropy(), options, anchors=anchors, gamma=gamma
        )
        self.text_weight, self.distance_weight = text_weight, distance_weight
        self.confidence_weight = confidence_weight

    contiguous: ClassVar[bool] = True

    @property
    def reads_target(self) -> bool:
        return self.distance_weight > 0

    def _score(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,
        totals: StepTotals,
    ) -> HeadLoss:
        draft, head = self.draft_model, step_head(self.draft_model)
        state_NE = hidden_PE.index_select(0, task.elements.element_N)
        features_NR = self._token_features(ready, task.elements, state_NE)
        weight_N = torch.where(task.charged_N, coefficient_N, 0.0)
        scores = frozen_head_loss(
            hidden_PE,
            draft.lm_head.weight,
            TokenTask(
                task.elements,
                self._labels(ready),
                self.text_weight,
                self.distance_weight,
                ready.supervision,
                self.chunk_rows,
            ),
            coefficient_N=weight_N,
            token=(features_NR, head.out_WR),
        )
        loss, row_loss_N = scores.loss, scores.row_loss_N
        if draft.confidence_head is not None and self.confidence_weight > 0:
            accepted_N = (1 - 0.5 * scores.distance_N).clamp(0, 1)
            log_odds_N = draft.confidence_head(state_NE, features_NR)
            bce_N = F.binary_cross_entropy_with_logits(log_odds_N, accepted_N, reduction="none")
            loss = loss + self.confidence_weight * (bce_N * weight_N).sum()
            row_loss_N = row_loss_N + self.confidence_weight * bce_N.detach()
        return replace(scores, loss=loss, row_loss_N=row_loss_N)
