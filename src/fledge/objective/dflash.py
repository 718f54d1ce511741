"""DFlash's objective: every token of a block against the text or the target's distribution.

Weights decay with depth (`gamma`) or follow D-PACE (arXiv 2605.18810): with q_k the probability
that the draft gives to the text's token at depth k, and s_k = (1 + q_k) / 2, the weight of depth k
is the sum over m >= k of s_0 s_1 ... s_m: roughly how many tokens are lost if it is wrong.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.distributed import World
from fledge.core.head import HeadLike
from fledge.draft.block import BlockDraftModel
from fledge.kernels.attention.reference import AttentionKind
from fledge.objective.autocast import no_autocast
from fledge.objective.base import StepOptions, StepTotals
from fledge.objective.block import BlockTrainerModule
from fledge.objective.frozen_head import TokenScores, TokenTask, frozen_head_loss
from fledge.objective.head_loss import HeadLoss, HeadTask
from fledge.objective.losses.base import Loss
from fledge.objective.losses.registry import loss_of
from fledge.objective.losses.text import TextCrossEntropy
from fledge.objective.rollout import ReadyBatch
from fledge.objective.supervision import VocabularyTensors
from fledge.rollout.block_plan import BlockPlan


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
        options = StepOptions(
            target_head=target_head,
            compute_dtype=compute_dtype,
            chunk_rows=chunk_rows,
            attention=attention,
        )
        super().__init__(draft_model, vocabulary, chosen, options, anchors=anchors, gamma=gamma)
        self.weights = weights

    @property
    def _by_text(self) -> bool:
        return isinstance(self.loss, TextCrossEntropy)

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
                scores = self._text_scores(batch, hidden_PE, None, None)
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
            return super()._score(ready, task, hidden_PE, coefficient_N, totals)
        if self.weights == "dpace":
            scores = self._text_scores(ready, hidden_PE, None, totals.weight_sum)
        else:
            weight_N = torch.where(task.charged_N, coefficient_N, 0.0)
            scores = self._text_scores(ready, hidden_PE, weight_N, None)
        loss = scores.loss
        if self.weights == "dpace" and totals.weight_sum is None:  # this batch is the whole step
            total = scores.coefficient_N.sum()
            loss = loss / total.where(total > 0, 1.0)
        return HeadLoss(loss, scores.row_loss_N, scores.correct_N)

    def _text_scores(
        self,
        ready: ReadyBatch[BlockPlan],
        hidden_PE: Tensor,
        coefficient_N: Tensor | None,  # None: D-PACE's
        total: Tensor | None,  # sum of D-PACE's weights over the step
    ) -> TokenScores:
        plan = ready.plan
        charged_N = self._charged_elements(plan, ready.covered_M)

        def weigh(row_loss_N: Tensor) -> Tensor:
            weight_N = dpace_weights(plan, row_loss_N, charged_N)
            if total is None:
                return weight_N
            return weight_N / total.where(total > 0, 1.0).to(weight_N.dtype)

        return frozen_head_loss(
            hidden_PE,
            self.draft_model.lm_head.weight,
            TokenTask(plan.head, self._labels(ready), chunk_rows=self.chunk_rows),
            coefficient_N=coefficient_N,
            weigh=weigh if coefficient_N is None else None,
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
