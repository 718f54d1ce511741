"""What all rollout objectives share: the calls, the supervision, the head, the metrics.

`prepare` plans a batch and determines coverage; `score` runs the rollout, then head and loss, then
the metrics. A subclass defines how a batch is laid out (`plan`), what the draft computes on it
(`_states`), which elements are charged (`_charged`) and the weight of each depth
(`_coefficients`). The target's answer arrives shifted (see `core.batch`); the only shift here is
that of the loss mask on the host (`plan_rows`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.distributed import World
from fledge.core.head import TargetHead
from fledge.core.rows import PACKING_FIELDS, TokenBatch, shift_left
from fledge.methods.losses.base import Loss
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.head_loss import (
    HeadLoss,
    HeadTask,
    head_acceptance,
    head_loss,
    mean_acceptance,
)
from fledge.methods.shared.objective import RolloutOutput, StepOptions, StepTotals
from fledge.methods.shared.supervision import (
    Supervision,
    VocabularyTensors,
    check_shapes,
    head_rows,
    read_supervision,
)
from fledge.rollout.context import ContextRanks
from fledge.rollout.plan import RolloutPlan
from fledge.rollout.slots import RowMasks, draw_seed

Plan = TypeVar("Plan", bound=RolloutPlan)


@dataclass(frozen=True)
class ReadyBatch(Generic[Plan]):
    """Everything about a batch that is computed once, before the draft runs."""

    plan: Plan
    input_ids: Tensor  # [B, T]; with several ranks on the same rows [L], this rank's part
    aux_OD: Tensor  # [O, A * D] on the key axis; with several ranks, this rank's part
    supervision: Supervision
    covered_M: Tensor  # bool per target slot: the target's top token is in the draft vocabulary
    charged_K: Tensor  # int64 per depth: chargeable elements, by which the loss is divided


def _without_padding(plan: RolloutPlan, mask_N: Tensor) -> Tensor:
    """A mask of head elements, without those that only pad the plan to a round size."""
    return mask_N if plan.head.real_N is None else mask_N & plan.head.real_N


class RolloutTrainerModule(nn.Module, ABC, Generic[Plan]):
    """A draft and its objective; call it with `**batch.to_trainer_inputs()`."""

    draft_model: DraftModel
    depths: int  # of a rollout: the length of all per-depth counts
    selected_token_ids: Tensor
    selected_token_mask: Tensor
    quantum: int = 0
    """In training, the sizes of plans are multiples of it, so that they recur and steps can be
    recorded as CUDA graphs (`training/recorded.py`); 0: sizes are exact."""

    def __init__(
        self,
        draft_model: DraftModel,
        vocabulary: VocabularyTensors,
        loss: Loss,
        options: StepOptions,
    ) -> None:
        super().__init__()
        draft_model.set_vocab_mapping(vocabulary.ids_W, vocabulary.member_V)
        self.draft_model = draft_model
        ids_W = vocabulary.ids_W.to(draft_model.device)
        member_V = vocabulary.member_V.to(draft_model.device).bool()
        self.register_buffer("selected_token_ids", ids_W, persistent=False)
        self.register_buffer("selected_token_mask", member_V, persistent=False)
        # the share of all steps that are done, on the device: recorded steps read it there
        self.progress: Tensor
        done = torch.zeros((), dtype=torch.float64, device=ids_W.device)
        self.register_buffer("progress", done, persistent=False)
        self.loss = loss
        self.compute_dtype, self.attention = options.compute_dtype, options.attention
        self.chunk_rows, self.context = options.chunk_rows, options.context
        head = options.target_head
        self.target_head = None if head is None else TargetHead.of(head)
        if self.target_head is not None and len(self.target_head.weight_VD) != len(member_V):
            raise ValueError(
                f"target_head: {len(self.target_head.weight_VD)} tokens, the vocabulary has "
                f"{len(member_V)}"
            )
        self._draft_head: TargetHead | None = None

    # --- what an objective defines --------------------------------------------------------------

    @property
    def reads_target(self) -> bool:
        return True

    @property
    def can_be_even(self) -> bool:
        """Whether the objective, with its options, allows a `quantum`."""
        return False

    def quantum_for(self, tokens: int, *, sizes: int) -> int:
        """The quantum for which batches of `tokens` tokens have about `sizes` different sizes."""
        raise NotImplementedError

    @property
    def _ranks(self) -> ContextRanks | None:
        """The ranks that train on the same rows. None in eval mode, where every rank measures its
        own rows: without a backward pass there is no memory to save by sharing."""
        return self.context if self.draft_model.training else None

    def _sample_seed(self) -> int:
        """Draw a seed from torch's generator, for calls that pass none."""
        if self._ranks is not None:
            raise ValueError("seed: ranks on the same rows must sample alike; give the step's seed")
        return draw_seed()

    def _seed(self, seed: int | None) -> int:
        """The seed of a plan: in evaluation always the same, so that only the draft differs."""
        if seed is not None:
            return seed
        return self._sample_seed() if self.draft_model.training else 0

    @property
    def _num_losses(self) -> int:
        """The number of means that make up the loss: one per depth, or 1 over all elements."""
        return self.depths

    @abstractmethod
    def plan(self, masks: RowMasks, seed: int | None = None) -> Plan:
        """Lay out the rollout on the draft's device. Masks on the host are read without a
        synchronization. `seed` determines all sampling."""

    @abstractmethod
    def _states(
        self, plan: Plan, aux_OD: Tensor, input_ids_L: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        """Head inputs [rows of all depths end to end, E], after the final norm, computed in `dtype`
        (None: the dtype of the parameters)."""

    def _covered(self, plan: Plan, input_ids_BT: Tensor, supervision: Supervision) -> Tensor:
        """[M] bool: whether the target's top token at each slot is in the draft vocabulary."""
        return supervision.coverage()

    @abstractmethod
    def _charged(self, covered_N: Tensor) -> Tensor:
        """Which head elements are charged, given which of them are covered."""

    @abstractmethod
    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        """[K] the weight of one charged element of each depth in the loss."""

    # --- a step ---------------------------------------------------------------------------------

    def plan_rows(self, rows: TokenBatch, seed: int) -> Plan:
        """Lay out the rollout from unshifted rows on the host. The loss mask is shifted with its
        tokens (slot t reads token t + 1), as is everything in the target's answer."""
        return self.plan(RowMasks.of(rows, shift_left(rows.loss_mask)), seed)

    def prepare(self, rows: TokenBatch, answer: Eagle3TargetBatch, seed: int) -> ReadyBatch[Plan]:
        """Plan a batch and count its charged elements. The count [K], summed over all micro-batches
        and ranks of an optimizer step, is the `normalizer` that `score` takes."""
        plan = self.plan_rows(rows, seed)
        inputs: dict[str, Any] = answer.to_trainer_inputs()
        return self.prepare_inputs(**inputs, plan=plan)

    def prepare_inputs(
        self,
        input_ids: Tensor,  # [B, T], shifted, as all that follows except aux and attention mask
        attention_mask: Tensor,  # [B, T]
        loss_mask: Tensor,  # [B, T]
        aux_hidden_states: Tensor,  # [B, T, aux layers * D]
        target_logits: Tensor | None = None,  # [B, T, V]
        *,
        plan: Plan | None = None,
        seed: int | None = None,
        **rest: Tensor | None,  # the other supervisions (see `read_supervision`), and packing
    ) -> ReadyBatch[Plan]:
        """`prepare` from the arguments of `forward`. Without a plan, one is made from the masks,
        which takes one synchronization if they are on the device."""
        packing = {name: rest.pop(name, None) for name in PACKING_FIELDS}
        rest["target_logits"] = target_logits
        given = {
            "attention_mask": attention_mask,
            "loss_mask": loss_mask,
            "aux_hidden_states": aux_hidden_states,
            **rest,
        }
        config, head = self.draft_model.spec, self.target_head
        check_shapes(input_ids, given, config=config, vocabulary=self._vocabulary, head=head)
        plan = plan or self.plan(RowMasks(loss_mask, attention_mask, **packing), seed)
        with no_autocast(self.selected_token_ids.device.type):
            supervision = read_supervision(plan, self._vocabulary, self._heads, **rest)
            covered_M = self._covered(plan, input_ids, supervision)
        if plan.asked_MK is None:
            charged_K = per_depth(plan, self._charged_elements(plan, covered_M), self.depths)
        else:  # sampled: the elements that were kept represent all of them
            charged_K = (plan.asked_MK & self._charged(covered_M)[:, None]).sum(0)
        if plan.share is None:
            inputs = (input_ids, plan.on_key_axis(aux_hidden_states))
        else:
            inputs = (plan.share.tokens(input_ids), plan.share.states(aux_hidden_states))
        return ReadyBatch(plan, *inputs, supervision, covered_M, charged_K)

    def begin_step(self, done: float) -> None:
        """See `Objective.begin_step`."""
        self.progress.fill_(done)

    @torch.no_grad()
    def totals(self, ready: Sequence[ReadyBatch[Plan]], world: World) -> StepTotals | None:
        """The mean acceptance of charged elements over all micro-batches and ranks (per depth where
        each depth is a loss of its own), for a loss that is weighted by it. This takes an extra
        forward pass of the draft. None for other losses, and for one micro-batch on one rank, where
        `score` takes the mean from its own states."""
        if not self.loss.needs_acceptance or (len(ready) <= 1 and world.size == 1):
            return None
        device, head_WE = self.selected_token_ids.device, self.draft_model.lm_head.weight
        sums_2L = torch.zeros(2, self._num_losses, dtype=torch.float64, device=device)
        with no_autocast(device.type) as autocast_dtype:
            for batch in ready:
                hidden_PE = self._hidden(batch, autocast_dtype)
                sums_2L += head_acceptance(hidden_PE, head_WE, self._head_task(batch))
        return StepTotals(acceptance_L=mean_acceptance(world.sum_(sums_2L)))

    def score(
        self,
        ready: ReadyBatch[Plan],
        normalizer: Tensor | None = None,  # [K]; None: this batch is the whole step
        totals: StepTotals | None = None,  # of the step, as returned by `totals`
    ) -> RolloutOutput:
        """Loss and metrics. With the step's `normalizer` and `totals`, the losses of its
        micro-batches add up to the loss of the step, however the step is split.

        Under torch.autocast the step computes in autocast's dtype, unless the module has a
        `compute_dtype`; the backward pass belongs outside the context, as usual.
        """
        plan, count_K = ready.plan, ready.charged_K if normalizer is None else normalizer
        with no_autocast(self.selected_token_ids.device.type) as autocast_dtype:
            hidden_PE = self._hidden(ready, autocast_dtype)
            task = self._head_task(ready)
            coefficient_N = self._coefficients(count_K, hidden_PE.dtype)[plan.head.depth_N]
            scored = self._score(ready, task, hidden_PE, coefficient_N, totals or StepTotals())
            covered_N = _without_padding(plan, ready.covered_M[plan.head.target_N])
            return rollout_output(
                plan, scored, charged_N=task.charged_N, covered_N=covered_N, depths=self.depths
            )

    def forward(
        self, *inputs: Tensor, normalizer: Tensor | None = None, **more: Any
    ) -> RolloutOutput:
        """Loss and metrics of one batch: `prepare_inputs`, whose arguments these are, then `score`.
        Pass `normalizer` [K] if the batch is one of several; if the loss needs `totals`, these have
        to be scored as `train_step` does it."""
        return self.score(self.prepare_inputs(*inputs, **more), normalizer)

    # --- the parts of a step --------------------------------------------------------------------

    def _hidden(self, ready: ReadyBatch[Plan], autocast_dtype: torch.dtype | None) -> Tensor:
        """Head inputs of a batch, see `_states`."""
        plan, input_ids = ready.plan, ready.input_ids
        if plan.share is None:
            input_ids = plan.on_key_axis(input_ids)
        return self._states(plan, ready.aux_OD, input_ids, self.compute_dtype or autocast_dtype)

    def _charged_elements(self, plan: Plan, covered_M: Tensor) -> Tensor:
        """[N] bool: which head elements of a plan are charged."""
        return _without_padding(plan, self._charged(covered_M[plan.head.target_N]))

    def _head_task(self, ready: ReadyBatch[Plan]) -> HeadTask:
        elements = ready.plan.head
        return HeadTask(
            elements=elements,
            supervision=ready.supervision,
            charged_N=self._charged_elements(ready.plan, ready.covered_M),
            loss=self.loss,
            num_losses=self._num_losses,
            chunk_rows=self.chunk_rows,
        )

    def _score(
        self,
        ready: ReadyBatch[Plan],
        task: HeadTask,
        hidden_PE: Tensor,
        coefficient_N: Tensor,  # weight of a charged element in the loss
        totals: StepTotals,  # empty if this batch is the whole step
    ) -> HeadLoss:
        head_WE, acceptance_L = self.draft_model.lm_head.weight, totals.acceptance_L
        return head_loss(
            hidden_PE, head_WE, task, coefficient_N=coefficient_N, acceptance_L=acceptance_L
        )

    @property
    def _vocabulary(self) -> VocabularyTensors:
        return VocabularyTensors(self.selected_token_ids, self.selected_token_mask)

    def _heads(self, device: torch.device) -> tuple[TargetHead, TargetHead]:
        """The target's head on the batch's device, and its rows for the draft vocabulary."""
        if self.target_head is None:
            raise ValueError("target_head: needed to read target_last_hidden_states")
        if self.target_head.weight_VD.device != device:
            self.target_head, self._draft_head = self.target_head.to(device), None
        if self._draft_head is None:
            self._draft_head = head_rows(self.target_head, self._vocabulary)
        return self.target_head, self._draft_head


# --- metrics --------------------------------------------------------------------------------------
# Sums and counts per depth, on the device. `depths` is the number K of depths that an objective
# reports. A plan may be shallower: EAGLE-1 trains one depth and reports as many as serving drafts.


def per_depth(plan: RolloutPlan, values_N: Tensor, depths: int) -> Tensor:
    """[K] sums of per-element values; in int64 for counts."""
    if not values_N.is_floating_point():
        values_N = values_N.to(torch.int64)
    return values_N.new_zeros(depths).index_add_(0, plan.head.depth_N, values_N)


def rollout_output(
    plan: RolloutPlan,
    scored: HeadLoss,
    *,
    charged_N: Tensor,  # bool
    covered_N: Tensor,  # bool; False for elements that only pad the plan
    depths: int,
) -> RolloutOutput:
    """The loss and the metrics of a batch whose elements are scored."""
    # an element that is not covered is a rejection, charged or not
    correct_N = scored.correct_N & covered_N
    counts = (plan.step_valid_K, *_prefix_counts(plan, correct_N))
    valid_K, reached_K, hits_K = (F.pad(count, (0, depths - len(count))) for count in counts)
    return RolloutOutput(
        loss=scored.loss,
        loss_sums=per_depth(plan, scored.row_loss_N * charged_N, depths),
        charged=per_depth(plan, charged_N, depths),
        correct=per_depth(plan, correct_N, depths),
        step_valid=valid_K,
        step_reached=reached_K,
        step_prefix_hits=hits_K,
    )


def _prefix_counts(plan: RolloutPlan, correct_N: Tensor) -> tuple[Tensor, Tensor]:
    """Per depth of the plan: slots that are supervised up to it and correct at all depths before
    it, and how many of those are correct at it too."""
    correct_P = torch.zeros_like(plan.supervised_P)
    correct_P[plan.head.element_N] = correct_N
    hits, reached = [], []
    alive = torch.ones_like(plan.by_depth(correct_P)[0])
    for correct, supervised in zip(
        plan.by_depth(correct_P), plan.by_depth(plan.supervised_P), strict=True
    ):
        alive = alive[: len(correct)] & supervised
        reached.append(alive.sum())
        alive = alive & correct
        hits.append(alive.sum())
    return torch.stack(reached), torch.stack(hits)


# --- autocast ------------------------------------------------------------------------------------
# An objective under torch.autocast: the whole step runs in the dtype of autocast.


@contextmanager
def no_autocast(kind: str) -> Iterator[torch.dtype | None]:
    """Disable torch.autocast and yield its dtype (None if it was off). A step computes all matrix
    products in one dtype, and its hand-written gradients in the same."""
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        yield None
        return
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield dtype
