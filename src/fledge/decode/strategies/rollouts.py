"""The teacher-forced counterpart of a strategy: what it would draft from every slot of a text.

Texts are packed as in training; the loss mask marks the answers. Slot t reads token t + 1 and
drafts token t + 2, so the slots that count are those whose next two tokens belong to one answer:
the first token of an answer comes from the prompt's pass.

    token            p p p a a a a p p        p prompt, a answer
    slot drafts      . . a a a . . . .        (tokens 4, 5, 6)

Shapes: N rollout elements.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.rollout.plan import RolloutPlan, plan_rollout
from fledge.rollout.slots import RowMasks


def drafting_slots(tokens: TokenBatch) -> Tensor:
    """[B, T] bool: slots that draft a token of an answer."""
    loss_BT = F.pad(tokens.loss_mask, (0, 2)).bool()
    assert tokens.doc_remaining is not None
    return loss_BT[:, 1:-1] & loss_BT[:, 2:] & (tokens.doc_remaining >= 2)


@dataclass(frozen=True)
class Rollouts(ABC):
    """Rollouts of the draft from all slots at once, `depths` tokens long."""

    draft: Any  # of the strategy's kind
    depths: int
    dtype: torch.dtype | None = None

    @property
    def selected_token_ids(self) -> Tensor:
        """Target ids of the draft's tokens."""
        selected: Tensor | None = self.draft.selected_token_ids
        if selected is None:
            raise ValueError("d2t: the draft has no vocabulary mapping")
        return selected

    def plan(self, tokens: TokenBatch) -> RolloutPlan:
        """A plan in which every drafting slot starts a rollout, up to the end of its answer."""
        masks = RowMasks.of(tokens, drafting_slots(tokens))
        return plan_rollout(masks, num_depths=self.depths, device=self.draft.device)

    def head_inputs(self, batch: Eagle3TargetBatch, plan: RolloutPlan) -> Sequence[Tensor]:
        """[N, E] per depth, in the plan's order of rows."""
        aux_TD = plan.on_key_axis(batch.aux_hidden_states.to(self.draft.device))
        ids_T = plan.on_key_axis(batch.input_ids.to(self.draft.device))
        return self.unroll(aux_TD, ids_T, plan)

    @abstractmethod
    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        """[N, E] per depth; aux states and next tokens lie on the plan's key axis."""

    def logits(self, head_input_NE: Tensor) -> Tensor:
        """[N, W] the draft's logits."""
        return F.linear(head_input_NE, self.draft.lm_head.weight.to(head_input_NE.dtype))
