"""DSpark's objective: three terms on a block in which each token depends on the one before it.

    text_weight * CE with the text's token + distance_weight * |q - p|
        + confidence_weight * BCE of the confidence towards 1 - |q - p| / 2

at every token of a block up to the first that is not supervised. q is softmax(head(state) + Markov
head(previous token)); in training the previous token is the text's. 1 - |q - p| / 2 is the
probability that the token is accepted; no gradient flows through it.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.head import HeadLike
from fledge.draft.block import BlockDraftModel
from fledge.kernels.attention.reference import AttentionKind
from fledge.objective.base import StepOptions, StepTotals
from fledge.objective.block import BlockTrainerModule
from fledge.objective.frozen_head import TokenTask, frozen_head_loss
from fledge.objective.head_loss import HeadLoss, HeadTask
from fledge.objective.losses.text import TextCrossEntropy
from fledge.objective.rollout import ReadyBatch
from fledge.objective.supervision import VocabularyTensors
from fledge.rollout.block_plan import BlockPlan


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
        if draft_model.markov_head is None:
            raise ValueError("markov_rank: the draft was built without a Markov head")
        if confidence_weight > 0 and draft_model.confidence_head is None:
            raise ValueError("confidence_head: the draft was built without one")
        if confidence_weight > 0 and distance_weight == 0:
            raise ValueError("confidence_weight: learns from the distance; give that a weight too")
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        options = StepOptions(
            target_head=target_head,
            compute_dtype=compute_dtype,
            chunk_rows=chunk_rows,
            attention=attention,
        )
        loss = TextCrossEntropy()
        super().__init__(draft_model, vocabulary, loss, options, anchors=anchors, gamma=gamma)
        self.text_weight, self.distance_weight = text_weight, distance_weight
        self.confidence_weight = confidence_weight

    contiguous: ClassVar[bool] = True

    @property
    def _by_text(self) -> bool:
        return True

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
        draft, head = self.draft_model, self.draft_model.markov_head
        assert head is not None
        features_NR = head.features(self._previous_tokens(ready), hidden_PE.dtype)
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
            state_NE = hidden_PE.index_select(0, task.elements.element_N)
            accepted_N = (1 - 0.5 * scores.distance_N).clamp(0, 1)
            log_odds_N = draft.confidence_head(state_NE, features_NR)
            bce_N = F.binary_cross_entropy_with_logits(log_odds_N, accepted_N, reduction="none")
            loss = loss + self.confidence_weight * (bce_N * weight_N).sum()
            row_loss_N = row_loss_N + self.confidence_weight * bce_N.detach()
        return HeadLoss(loss, row_loss_N, scores.correct_N)
