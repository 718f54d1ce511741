"""EAGLE-1's objective: predict the target's next hidden state, and the token its head derives.

    loss = feature_weight * smooth L1(state, h) + token_weight * soft CE(head(state), head(h))

at every supervised slot t, where h is the target's state at t + 1. The interface is that of
`RolloutTrainerModule`; docs/semantics.md has the rules.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.errors import BadInput
from fledge.core.head import HeadLike
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.losses.base import Loss
from fledge.methods.losses.registry import loss_of
from fledge.methods.shared.head_loss import HeadLoss, HeadTask, head_loss
from fledge.methods.shared.objective import StepOptions, StepTotals
from fledge.methods.shared.rollout_objective import ReadyBatch, RolloutTrainerModule
from fledge.methods.shared.supervision import HiddenSupervision, VocabularyTensors
from fledge.methods.shared.unroll import NoisyPlan, noisy, uniform_noise
from fledge.rollout.attention import AttentionKind
from fledge.rollout.context import ContextRanks
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks


class Eagle1TrainerModule(RolloutTrainerModule[NoisyPlan]):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`.

    The batch carries the target's last hidden states twice: as the only aux layer (unshifted: what
    the draft reads) and as supervision (shifted: what it predicts). In training a rollout is one
    step long and reads noisy features; in eval mode it takes `draft_tokens` steps, each from the
    draft's own state, as in serving. The draft's head must be the target's: engines use no other
    (`draft_model.copy_head_from_target`).
    """

    draft_model: LlamaEagle1DraftModel

    def __init__(
        self,
        draft_model: LlamaEagle1DraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        target_head: HeadLike,
        draft_tokens: int = 5,
        loss: str | Loss = "ce",
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        feature_noise: float = 0.1,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
        context: ContextRanks | None = None,
    ) -> None:
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention, context)
        super().__init__(draft_model, vocabulary, loss_of(loss), options)
        assert self.target_head is not None
        if self.target_head.bias_V is not None:
            raise ValueError(
                "target_head: it has a bias, which engines do not give an EAGLE-1 draft; use eagle3"
            )
        if not _same_head(draft_model.lm_head.weight, self.target_head.weight_VD):
            raise BadInput(
                "the draft's head is not the target's, which EAGLE-1 uses and does not train",
                where="draft_model",
                fix="draft_model.copy_head_from_target(the target's lm_head)",
            )
        draft_model.config.draft_tokens = draft_tokens  # kept in config.json
        self.depths = draft_tokens
        self.feature_weight, self.token_weight = feature_weight, token_weight
        self.feature_noise = feature_noise

    def plan(self, masks: RowMasks, seed: int | None = None) -> NoisyPlan:
        """One step from every supervised slot; in eval mode `draft_tokens` steps."""
        training, device = self.draft_model.training, self.selected_token_ids.device
        depths = 1 if training else self.depths
        plan = plan_rollout(masks, num_depths=depths, device=device, ranks=self._ranks)
        if training and self.feature_noise > 0:
            return noisy(plan, masks, self._sample_seed() if seed is None else seed)
        return NoisyPlan(**vars(plan))

    def _states(
        self, plan: NoisyPlan, aux_OD: Tensor, input_ids_L: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        if plan.word_O is not None:
            aux_OD = aux_OD + uniform_noise(plan.word_O, aux_OD.shape[1], self.feature_noise)
        return torch.cat(
            self.draft_model.unroll(
                aux_OD, input_ids_L, plan, compute_dtype=dtype, attention=self.attention
            )
        )

    def _charged(self, covered_N: Tensor) -> Tensor:
        return covered_N  # all of them: the draft has the target's vocabulary

    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        """The same weight for every step; training has only one."""
        wide = torch.promote_types(dtype, torch.float32)
        present_K = (count_K > 0).to(wide)
        return present_K / present_K.sum().clamp_min(1) / count_K.clamp_min(1)

    def _score(
        self,
        ready: ReadyBatch[NoisyPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,
        totals: StepTotals,
    ) -> HeadLoss:
        supervision = ready.supervision
        if not isinstance(supervision, HiddenSupervision):
            raise ValueError(
                "supervision: EAGLE-1 predicts the target's last hidden states; "
                "use hidden supervision"
            )
        tokens = head_loss(
            hidden_PE,
            self.draft_model.lm_head.weight,
            task,
            coefficient_N=self.token_weight * coefficient_N,
            acceptance_L=totals.acceptance_L,
        )
        elements = task.elements
        true_NE = supervision.hidden_SD.index_select(
            0, supervision.slot_M.index_select(0, elements.target_N)
        )
        distance_N = _distance(hidden_PE.index_select(0, elements.element_N), true_NE)
        weight_N = torch.where(task.charged_N, coefficient_N, 0.0)
        row_loss_N = self.token_weight * tokens.row_loss_N
        return replace(
            tokens,
            loss=tokens.loss + self.feature_weight * (distance_N * weight_N).sum(),
            row_loss_N=row_loss_N + self.feature_weight * distance_N.detach(),
        )


def _same_head(draft_VE: Tensor, target_VD: Tensor) -> bool:
    """Whether a draft's head is the target's, perhaps tuned or rounded, judged by some of its rows.
    A random head differs by more than the norm."""
    if draft_VE.is_meta:
        return True
    some_N = torch.linspace(0, len(draft_VE) - 1, 64).long()
    draft_NE, target_ND = (x[some_N.to(x.device)].detach().cpu() for x in (draft_VE, target_VD))
    return bool((draft_NE.float() - target_ND.float()).norm() <= 0.5 * target_ND.float().norm())


def _distance(state_NE: Tensor, true_NE: Tensor) -> Tensor:
    """[N] smooth L1 distance, averaged over channels."""
    wide = torch.promote_types(state_NE.dtype, torch.float32)
    channels_NE = F.smooth_l1_loss(state_NE.to(wide), true_NE.to(wide), reduction="none")
    return channels_NE.mean(dim=-1)
