"""Domino (arXiv 2605.29707): a GRU over the block's tokens so far corrects the logits, and the
backbone is trained without the correction first.

    memory = GRU(E[x_a] .. E[x_{a+k}]),  logits_k += W2 . SiLU(W1 . [state; memory])

from depth `pure_draft_prefix_len` on. The loss is (1 - l) CE(corrected) + l CE(plain); l falls from
`plain_weight` to 0 over the first `plain_share` of all steps. A new draft starts with W2 = 0, so
that it corrects nothing yet; the original starts at random.
"""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.head import HeadLike
from fledge.methods.block.config import BlockConfig
from fledge.methods.block.draft import BlockDraftModel, step_head
from fledge.methods.block.heads.base import StepHead, cast_linear
from fledge.methods.block.objective import BlockTrainerModule
from fledge.methods.block.plan import BlockPlan
from fledge.methods.losses.hard import TextCrossEntropy
from fledge.methods.shared.head_loss import HeadLoss, HeadTask, TokenTask, frozen_head_loss
from fledge.methods.shared.objective import StepOptions, StepTotals
from fledge.methods.shared.rollout_objective import ReadyBatch
from fledge.methods.shared.supervision import VocabularyTensors
from fledge.rollout.attention import AttentionKind


class DominoHead(StepHead):
    has_memory: ClassVar[bool] = True

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, memory, rank = config.hidden_size, config.gru_hidden_dim, config.markov_rank
        self.first_depth = config.pure_draft_prefix_len
        self.prefix_gru = nn.GRU(size, memory, bias=False)  # holds the weights in torch's order
        self.embed_proj = nn.Sequential(
            nn.Linear(size + memory, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.draft_vocab_size, bias=False),
        )

    @property
    def out_WR(self) -> Tensor:  # noqa: N802  (its shape)
        return cast("nn.Linear", self.embed_proj[2]).weight

    def inputs(self, embedding_NE: Tensor) -> Tensor:
        """[..., 3M] the part of the three gates that depends on the token alone."""
        return F.linear(embedding_NE, self._gru("weight_ih_l0", embedding_NE.dtype))

    def remember(self, memory_NM: Tensor | None, inputs_NX: Tensor) -> Tensor:
        reset, update, new = inputs_NX.chunk(3, dim=-1)
        if memory_NM is None:
            return (1 - update.sigmoid()) * new.tanh()
        gates = F.linear(memory_NM, self._gru("weight_hh_l0", memory_NM.dtype))
        old_reset, old_update, old_new = gates.chunk(3, dim=-1)
        kept = (update + old_update).sigmoid()
        fresh = (new + (reset + old_reset).sigmoid() * old_new).tanh()
        return (1 - kept) * fresh + kept * memory_NM

    def features(self, previous_N: Tensor, state_NE: Tensor, memory_NM: Tensor | None) -> Tensor:
        assert memory_NM is not None
        narrow = cast("nn.Linear", self.embed_proj[0])
        return F.silu(cast_linear(narrow, torch.cat([state_NE, memory_NM], dim=-1)))

    def _gru(self, name: str, dtype: torch.dtype) -> Tensor:
        return cast("Tensor", getattr(self.prefix_gru, name)).to(dtype)


class DominoTrainerModule(BlockTrainerModule):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`."""

    def __init__(
        self,
        draft_model: BlockDraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        target_head: HeadLike | None = None,
        plain_weight: float = 1.0,
        plain_share: float = 1.0,
        anchors: int = 512,
        gamma: float = 7.0,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
    ) -> None:
        if not isinstance(draft_model.token_head, DominoHead):
            raise ValueError("token_head: the draft was built without Domino's")
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention)
        super().__init__(
            draft_model, vocabulary, TextCrossEntropy(), options, anchors=anchors, gamma=gamma
        )
        self.plain_weight, self.plain_share = plain_weight, plain_share

    def _plain(self) -> Tensor:
        """The weight l of the plain logits in this step."""
        return self.plain_weight * (1 - self.progress / max(self.plain_share, 1e-9)).clamp_min(0)

    def _score(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,
        totals: StepTotals,
    ) -> HeadLoss:
        draft = self.draft_model
        state_NE = hidden_PE.index_select(0, task.elements.element_N)
        features_NR = self._token_features(ready, task.elements, state_NE)
        weight_N, plain = torch.where(task.charged_N, coefficient_N, 0.0), self._plain()
        return frozen_head_loss(
            hidden_PE,
            draft.lm_head.weight,
            TokenTask(task.elements, self._labels(ready), chunk_rows=self.chunk_rows),
            coefficient_N=weight_N * (1 - plain).to(weight_N.dtype),
            plain_N=weight_N * plain.to(weight_N.dtype),
            token=(features_NR, step_head(draft).out_WR),
        )
