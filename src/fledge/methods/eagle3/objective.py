"""EAGLE-3's training-time test: roll the draft out from every supervised slot and score each depth.

The interface is that of `RolloutTrainerModule`; docs/semantics.md has the rules.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fledge.methods.losses.base import Loss
from fledge.methods.losses.registry import loss_of
from fledge.methods.shared.objective import StepOptions
from fledge.methods.shared.rollout_objective import RolloutTrainerModule
from fledge.methods.shared.supervision import VocabularyTensors
from fledge.methods.shared.unroll import UnrolledDraftModel
from fledge.rollout.attention import AttentionKind
from fledge.rollout.context import ContextRanks
from fledge.rollout.plan import RolloutPlan, plan_rollout
from fledge.rollout.slots import RowMasks, check_counts

if TYPE_CHECKING:
    from fledge.core.head import HeadLike


class Eagle3TrainerModule(RolloutTrainerModule[RolloutPlan]):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`.

    `loss` is a `Loss` or its name in `losses.registry` ("ce", "kl", "hard", ...); `lk_loss_type`
    ("alpha" or "lambda", with `lk_kl_scale` and `lk_kl_decay`) replaces it. `compute_dtype` is the
    dtype of the step's matrix products if it differs from the parameters'. With `depth_keep` < 1,
    training continues a rollout to the next depth with that probability only, weighted so that the
    expected gradient is that of the full unroll. `attention="reference"` is the slow definition
    that tests compare with.
    """

    draft_model: UnrolledDraftModel

    def __init__(
        self,
        draft_model: UnrolledDraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        ttt_steps: int,
        lk_loss_type: str | None = None,
        lk_kl_scale: float = 1.0,
        lk_kl_decay: float = 3.0,
        target_head: "HeadLike | None" = None,
        loss: str | Loss = "ce",
        step_decay: float = 0.8,
        depth_keep: float = 1.0,
        compute_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        attention: AttentionKind = "fast",
        context: ContextRanks | None = None,
    ) -> None:
        check_counts(ttt_steps=ttt_steps)
        if not 0 < depth_keep <= 1:
            raise ValueError(f"depth_keep: must be in (0, 1], got {depth_keep!r}")
        vocabulary = VocabularyTensors(selected_token_ids, selected_token_mask)
        chosen = loss_of(loss, lk_loss_type, lk_kl_scale, lk_kl_decay)
        options = StepOptions(target_head, compute_dtype, chunk_rows, attention, context)
        super().__init__(draft_model, vocabulary, chosen, options)
        self.depths, self.step_decay = ttt_steps, step_decay
        self.depth_keep = depth_keep
        draft_model.config.ttt_steps = ttt_steps  # kept in config.json, for use without the run

    def plan(self, masks: RowMasks, seed: int | None = None) -> RolloutPlan:
        """Plan every supervised element, or with `depth_keep` a sample of them, drawn from `seed`
        (None: from torch's generator)."""
        if seed is None:
            seed = self._sample_seed() if self._depth_keep < 1 else 0
        return plan_rollout(
            masks,
            num_depths=self.depths,
            keep=self._depth_keep,
            seed=seed,
            device=self.selected_token_ids.device,
            ranks=self._ranks,
            quantum=self.quantum if self.draft_model.training else 0,
        )

    @property
    def can_be_even(self) -> bool:
        return self.depth_keep == 1 and self.context is None

    def quantum_for(self, tokens: int, *, sizes: int) -> int:
        """Each token may start a rollout."""
        return max(64, tokens // sizes)

    @property
    def _depth_keep(self) -> float:
        return self.depth_keep if self.draft_model.training else 1.0

    def _states(
        self, plan: RolloutPlan, aux_OD: Tensor, input_ids_L: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        states = self.draft_model(
            aux_OD, input_ids_L, plan, compute_dtype=dtype, attention=self.attention
        )
        return torch.cat(states)

    def _charged(self, covered_N: Tensor) -> Tensor:
        """Only covered elements: those whose target's top token is in the draft vocabulary."""
        return covered_N

    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        depth_K = torch.arange(self.depths, device=count_K.device, dtype=wide)
        decay_K = self.step_decay**depth_K
        represented_K = self._depth_keep**-depth_K  # elements that each sampled one represents
        return decay_K / decay_K.sum() / count_K.clamp_min(1) * represented_K


def simulated_accept_length(
    step_prefix_hits: Tensor | Sequence[float], step_valid: Tensor | Sequence[float]
) -> float:
    """tau = 1 + sum over depths of hits / valid; a depth without valid slots adds nothing.

    Every round yields the target's own token, and each drafted token for which all tokens before it
    were accepted. The value is a numpy float, which is a Python float.
    """
    hits = torch.as_tensor(step_prefix_hits).double().cpu().numpy()
    valid = torch.as_tensor(step_valid).double().cpu().numpy()
    if hits.shape != valid.shape:
        raise ValueError(f"step_valid: {valid.size} depths, step_prefix_hits has {hits.size}")
    share = np.divide(hits, valid, out=np.zeros_like(hits), where=valid > 0)
    return np.float64(1.0 + share.sum())
