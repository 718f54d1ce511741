"""What the objectives of block drafts share: how blocks are sampled, run and scored.

The interface is that of `rollout.RolloutTrainerModule`; docs/semantics.md has the rules. Depth k of
a rollout is the k-th token that a block proposes. The weight of an element falls with its depth;
the loss is divided by the sum of the weights of all elements, over all micro-batches and ranks.
"""

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fledge.draft.block import BlockDraftModel
from fledge.objective.base import StepOptions
from fledge.objective.losses.base import Loss
from fledge.objective.rollout import ReadyBatch, RolloutTrainerModule
from fledge.objective.supervision import Supervision, VocabularyTensors
from fledge.rollout.block_plan import ANCHOR_TOKENS, BlockPlan, plan_blocks
from fledge.rollout.cod import draw_seed
from fledge.rollout.slots import RowMasks

EVALUATION_SEED = 0  # the same blocks at every evaluation, so that only the draft differs


def layout(draft: BlockDraftModel, settings: Any) -> "partial[BlockPlan]":
    """How rows are laid out; `settings` is a section or an objective."""
    return partial(
        plan_blocks,
        size=draft.config.block_size,
        first_place=draft.first_place,
        anchors=settings.anchors,
        contiguous=settings.contiguous,
    )


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
        self.anchors, self.gamma = anchors, gamma
        self.quantum = 0  # rounds the sizes of a step up (`rollout/even_blocks.py`)
        # the draft id of every target token; 0 for tokens outside the draft vocabulary
        draft_id_V = torch.zeros(len(self.selected_token_mask), dtype=torch.int64)
        draft_id_V[vocabulary.ids_W.cpu()] = torch.arange(len(vocabulary.ids_W))
        self.draft_id_V: Tensor
        self.register_buffer("draft_id_V", draft_id_V.to(draft_model.device), persistent=False)

    # --- what an objective defines --------------------------------------------------------------

    contiguous: ClassVar[bool] = False
    """Whether a block is charged only up to its first token that is not supervised."""

    @property
    @abstractmethod
    def _by_text(self) -> bool:
        """Whether elements are scored against the text's token. Then an element is covered if that
        token is in the draft vocabulary; otherwise, if the target's top token is."""

    @property
    def reads_target(self) -> bool:
        """Whether the loss reads the target's distribution, and not only the text."""
        return not self._by_text

    # --- how a block draft is trained -----------------------------------------------------------

    @property
    def depths(self) -> int:
        return self.draft_model.drafts

    @property
    def _num_losses(self) -> int:
        return 1  # one mean acceptance over all elements

    def plan(self, masks: RowMasks, seed: int | None = None) -> BlockPlan:
        if seed is None:
            seed = draw_seed() if self.draft_model.training else EVALUATION_SEED
        return layout(self.draft_model, self)(
            masks,
            seed=seed,
            device=self.selected_token_ids.device,
            quantum=self.quantum if self.draft_model.training else 0,
            share_targets=self.reads_target,
        )

    @property
    def can_be_even(self) -> bool:
        """Whether the sizes of its steps may be rounded up (`quantum`)."""
        return True

    def quantum_for(self, tokens: int, *, sizes: int) -> int:
        """The quantum for batches of `tokens` tokens. The number of blocks is proportional to the
        number of tokens, so most batches have about as many, and sizes recur even with a quantum
        half as large."""
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
            wanted_P=plan.element_P,
            compute_dtype=dtype,
            attention=self.attention,
        )
        return states_PE

    def _charged(self, covered_N: Tensor) -> Tensor:
        """Only covered elements."""
        return covered_N

    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        """exp(-k / gamma), divided by the summed weights of all charged elements of the step."""
        wide = torch.promote_types(dtype, torch.float32)
        depth_K = torch.arange(self.depths, device=count_K.device, dtype=wide)
        weight_K = (-depth_K / self.gamma).exp()
        total = (weight_K * count_K).sum()
        return weight_K / total.where(total > 0, 1.0)

    def _labels(self, ready: ReadyBatch[BlockPlan]) -> Tensor:
        """[N] the text's tokens that the elements predict, as draft ids."""
        label_M = self.draft_id_V[_next_tokens(ready.input_ids, ready.plan.target_M)]
        return label_M.index_select(0, ready.plan.head.target_N)

    def _previous_tokens(self, ready: ReadyBatch[BlockPlan]) -> Tensor:
        """[N] the text's tokens before those that the elements predict, as target ids."""
        slot_N = ready.plan.target_M.index_select(0, ready.plan.head.target_N)
        return ready.input_ids.flatten().index_select(0, slot_N)


def _next_tokens(input_ids_BT: Tensor, slot_M: Tensor) -> Tensor:
    """The token after the one that each slot reads: documents are contiguous, so it is in the next
    place. The last slot has no next token, and is never among `slot_M`."""
    return input_ids_BT.flatten().roll(-1).index_select(0, slot_M)
