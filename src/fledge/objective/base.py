"""What every rollout objective shares: the call, the supervision, the head, the metrics.

`RolloutTrainerModule.forward` reads top to bottom: plan, coverage, rollout, head + loss, metrics.
An objective says how a batch is laid out (`plan`), what the draft computes on it (`_states`), which
elements are charged (`_charged`) and what each depth weighs (`_coefficients`). The batch comes
shifted (see `target.batch`), nothing shifts here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fledge.core.head import HeadLike, TargetHead
from fledge.draft.eagle3 import LlamaEagle3DraftModel
from fledge.kernels.attention.reference import AttentionKind
from fledge.objective.head_loss import head_loss
from fledge.objective.losses.base import Loss
from fledge.objective.supervision import (
    DraftVocabulary,
    HiddenSupervision,
    LogitsSupervision,
    ProbsSupervision,
    Supervision,
    head_rows,
)
from fledge.rollout.plan import RolloutPlan

_PACKING = ("position_ids", "seq_lens", "doc_remaining")
Plan = TypeVar("Plan", bound=RolloutPlan)


class Objective(Protocol):
    """What a trainer module offers: see `RolloutTrainerModule`."""

    @property
    def draft_model(self) -> nn.Module: ...
    @property
    def depths(self) -> int: ...
    @property
    def compute_dtype(self) -> torch.dtype | None: ...
    def plan(self, *masks: Any, **packing: Any) -> Any: ...
    def prepare(self, *inputs: Any, **more: Any) -> Any: ...
    def __call__(self, *inputs: Any, **more: Any) -> Any: ...


@dataclass(frozen=True)
class RolloutOutput:
    """One batch's loss and its metrics, as sums and counts on the device (no sync was made).

    Per depth k [K]: `loss_sums` over charged elements (fp32), `charged` and `correct` counts,
    `step_valid` slots supervised at all depths <= k, `step_reached` those of them right at all
    depths < k, `step_prefix_hits` those right at all depths <= k.
    """

    loss: Tensor  # differentiable scalar
    accuracy: Tensor  # correct / charged over all depths
    valid_tokens: Tensor  # charged elements over all depths, int64
    step_prefix_hits: Tensor
    step_valid: Tensor
    step_reached: Tensor
    loss_sums: Tensor
    charged: Tensor
    correct: Tensor

    @property
    def conditional_accuracy(self) -> Tensor:
        """[K]: right at depth k given right at all depths before."""
        return self.step_prefix_hits / self.step_reached.clamp_min(1)


@dataclass(frozen=True)
class PreparedBatch(Generic[Plan]):
    """What can be known of a batch before the draft runs, so that it is found out only once."""

    plan: Plan
    covered_M: Tensor  # bool per target slot: the draft can say the target's top token
    charged_K: Tensor  # int64 per depth: what the loss is divided by; all that could be charged


@contextmanager
def _no_autocast(kind: str) -> Iterator[torch.dtype | None]:
    """Switch torch.autocast off, and say which dtype it asked for: a step computes all of its
    matrices in one dtype, and its gradients, written out, in the same."""
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        yield None
        return
    asked = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield asked


class RolloutTrainerModule(nn.Module, ABC, Generic[Plan]):
    """A draft and its objective; call it with `**batch.to_trainer_inputs()`."""

    selected_token_ids: Tensor
    selected_token_mask: Tensor

    def __init__(
        self,
        draft_model: LlamaEagle3DraftModel,
        *,
        selected_token_ids: Tensor,
        selected_token_mask: Tensor,
        loss: Loss,
        target_head: HeadLike | None,
        compute_dtype: torch.dtype | None,
        chunk_rows: int | None,
        attention: AttentionKind,
    ) -> None:
        super().__init__()
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows: must be positive, got {chunk_rows!r}")
        draft_model.set_vocab_mapping(selected_token_ids, selected_token_mask)
        self.draft_model = draft_model
        device = draft_model.lm_head.weight.device
        ids_W, member_V = selected_token_ids.to(device), selected_token_mask.bool().to(device)
        self.register_buffer("selected_token_ids", ids_W, persistent=False)
        self.register_buffer("selected_token_mask", member_V, persistent=False)
        self.loss = loss
        self.compute_dtype, self.attention = compute_dtype, attention
        self.chunk_rows = chunk_rows
        self.target_head = None if target_head is None else TargetHead.of(target_head)
        if self.target_head is not None and len(self.target_head.weight_VD) != len(member_V):
            raise ValueError(
                f"target_head: {len(self.target_head.weight_VD)} tokens, the vocabulary has "
                f"{len(member_V)}"
            )
        self._draft_head: TargetHead | None = None

    # --- what an objective says -----------------------------------------------------------------

    @property
    @abstractmethod
    def depths(self) -> int:
        """Depths of a rollout: the length of every per-depth count."""

    @property
    def _num_losses(self) -> int:
        """How many means the loss is made of: one a depth, or 1 over all elements together."""
        return self.depths

    @abstractmethod
    def plan(
        self,
        loss_mask: Tensor,
        attention_mask: Tensor,
        *,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
        seed: int | None = None,
    ) -> Plan:
        """Lay out a batch's rollout on the draft's device. Masks on the host spare the step its
        one sync: plan while the target runs, and hand the plan to `prepare`.

        `seed` fixes what is sampled, where something is: give one per optimizer step, the same to
        its micro-batches and ranks, and neither resuming nor cutting changes what is sampled.
        """

    @abstractmethod
    def _states(
        self, plan: Plan, aux_TD: Tensor, input_ids_T: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        """Head inputs [all depths' rows end to end, E], after the final norm, computed in `dtype`
        (None: the parameters')."""

    @abstractmethod
    def _charged(self, covered_N: Tensor) -> Tensor:
        """Which head elements pay, given which of them the draft could say."""

    @abstractmethod
    def _coefficients(self, count_K: Tensor, dtype: torch.dtype) -> Tensor:
        """[K] what one charged element of a depth counts in the loss."""

    # --- the call -------------------------------------------------------------------------------

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        aux_hidden_states: Tensor,
        *,
        plan: Plan | None = None,
        seed: int | None = None,
        **rest: Tensor | None,
    ) -> PreparedBatch[Plan]:
        """Plan a batch and count what it will be charged for: [K] of this count, summed over the
        micro-batches and ranks of an optimizer step, is the `normalizer` of each of them.

        Takes the same arguments as the call; hand the result over as `prepared`.
        """
        packing = {name: rest.pop(name, None) for name in _PACKING}
        rows = {"attention_mask": attention_mask, "loss_mask": loss_mask}
        self._check_shapes(input_ids, **rows, aux_hidden_states=aux_hidden_states, **rest)
        plan = plan or self.plan(loss_mask, attention_mask, seed=seed, **packing)
        covered_M = self._supervision(plan, **rest).coverage()
        if plan.asked_MK is None:
            charged_K = self._per_depth(plan, self._charged(covered_M[plan.head.target_N]))
        else:  # thinned: the rest stands for all of them
            charged_K = (plan.asked_MK & self._charged(covered_M)[:, None]).sum(0)
        return PreparedBatch(plan, covered_M, charged_K)

    def forward(
        self,
        input_ids: Tensor,  # [B, T], shifted, as all that follows except aux and attention mask
        attention_mask: Tensor,  # [B, T]
        loss_mask: Tensor,  # [B, T]
        aux_hidden_states: Tensor,  # [B, T, 3 * D]
        target_logits: Tensor | None = None,  # [B, T, V]
        *,
        target_probs: Tensor | None = None,  # [B, T, W]
        position_mask: Tensor | None = None,  # [B, T, 1]
        target_last_hidden_states: Tensor | None = None,  # [B, T, D]
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
        normalizer: Tensor | None = None,  # [K]
        prepared: PreparedBatch[Plan] | None = None,
        seed: int | None = None,
    ) -> RolloutOutput:
        """Loss and metrics of one batch.

        With `normalizer` the losses of the micro-batches of a step add up to the loss of the step
        (but for the lambda loss, whose weight each micro-batch takes from its own acceptance).
        Under torch.autocast its dtype is the step's, unless the module has a `compute_dtype`; the
        backward pass belongs outside, as always.
        """
        answers: dict[str, Any] = {
            "target_logits": target_logits,
            "target_probs": target_probs,
            "position_mask": position_mask,
            "target_last_hidden_states": target_last_hidden_states,
        }
        with _no_autocast(self.selected_token_ids.device.type) as asked_dtype:
            if prepared is None:
                prepared = self.prepare(
                    input_ids, attention_mask, loss_mask, aux_hidden_states, seed=seed,
                    position_ids=position_ids, seq_lens=seq_lens, doc_remaining=doc_remaining,
                    **answers,
                )  # fmt: skip
            plan = prepared.plan
            aux_TD, input_ids_T = plan.on_key_axis(aux_hidden_states), plan.on_key_axis(input_ids)
            hidden_EE = self._states(plan, aux_TD, input_ids_T, self.compute_dtype or asked_dtype)
            covered_N = prepared.covered_M[plan.head.target_N]
            charged_N = self._charged(covered_N)
            count_K = prepared.charged_K if normalizer is None else normalizer
            scored = head_loss(
                hidden_EE,
                self.draft_model.lm_head.weight,
                elements=plan.head,
                supervision=self._supervision(plan, **answers),
                charged_N=charged_N,
                coefficient_N=self._coefficients(count_K, hidden_EE.dtype)[plan.head.depth_N],
                num_losses=self._num_losses,
                loss=self.loss,
                chunk_rows=self.chunk_rows,
            )
            loss_sums = self._per_depth(plan, scored.row_loss_N * charged_N)
            # a target that the draft cannot say is a rejection, charged or not
            charged_K = self._per_depth(plan, charged_N)
            return self._output(
                plan, scored.loss, loss_sums, charged_K, scored.correct_N & covered_N
            )

    def _output(
        self, plan: Plan, loss: Tensor, loss_sums: Tensor, charged_K: Tensor, correct_N: Tensor
    ) -> RolloutOutput:
        correct_E = torch.zeros_like(plan.supervised_E)
        correct_E[plan.head.element_N] = correct_N
        hits, reached = [], []
        alive = torch.ones_like(plan.by_depth(correct_E)[0])
        for correct, supervised in zip(
            plan.by_depth(correct_E), plan.by_depth(plan.supervised_E), strict=True
        ):
            alive = alive[: len(correct)] & supervised
            reached.append(alive.sum())
            alive = alive & correct
            hits.append(alive.sum())
        correct_K = self._per_depth(plan, correct_N)
        valid_tokens = charged_K.sum()
        return RolloutOutput(
            loss=loss,
            accuracy=correct_K.sum() / valid_tokens.clamp_min(1),
            valid_tokens=valid_tokens,
            step_prefix_hits=torch.stack(hits),
            step_valid=plan.step_valid_K,
            step_reached=torch.stack(reached),
            loss_sums=loss_sums,
            charged=charged_K,
            correct=correct_K,
        )

    def _check_shapes(self, input_ids: Tensor, **given: Tensor | None) -> None:
        """Everything fits the rows, the draft and its vocabulary, or is named."""
        rows_BT = list(input_ids.shape)
        shapes = {
            "attention_mask": rows_BT,
            "loss_mask": rows_BT,
            "aux_hidden_states": [*rows_BT, self.draft_model.fc.in_features],
            "target_logits": [*rows_BT, len(self.selected_token_mask)],
            "target_probs": [*rows_BT, len(self.selected_token_ids)],
            "position_mask": [*rows_BT, 1],
        }
        if self.target_head is not None:
            shapes["target_last_hidden_states"] = [*rows_BT, self.target_head.weight_VD.shape[1]]
        for name, shape in shapes.items():
            tensor = given.get(name)
            if tensor is not None and list(tensor.shape) != shape:
                raise ValueError(f"{name}: must be {shape}, got {list(tensor.shape)}")

    def _per_depth(self, plan: Plan, values_N: Tensor) -> Tensor:
        """[K] sums of per-element values; counts in int64."""
        if not values_N.is_floating_point():
            values_N = values_N.to(torch.int64)
        return values_N.new_zeros(self.depths).index_add_(0, plan.head.depth_N, values_N)

    def _supervision(
        self,
        plan: RolloutPlan,
        *,
        target_logits: Tensor | None = None,
        target_probs: Tensor | None = None,
        position_mask: Tensor | None = None,
        target_last_hidden_states: Tensor | None = None,
    ) -> Supervision:
        given = [target_logits is not None, target_probs is not None]
        given.append(target_last_hidden_states is not None)
        if sum(given) != 1 or (target_probs is None) != (position_mask is None):
            raise ValueError(
                "supervision: give exactly one of target_logits, target_probs with position_mask, "
                "target_last_hidden_states"
            )
        vocabulary = DraftVocabulary(self.selected_token_ids, self.selected_token_mask)
        if target_logits is not None:
            return LogitsSupervision(target_logits.flatten(0, 1), plan.target_M, vocabulary)
        if target_probs is not None and position_mask is not None:
            return ProbsSupervision(
                target_probs.flatten(0, 1), position_mask.reshape(-1), plan.target_M
            )
        assert target_last_hidden_states is not None
        hidden_SD = target_last_hidden_states.flatten(0, 1)
        head, draft_head = self._heads(hidden_SD.device)
        return HiddenSupervision(hidden_SD, plan.target_M, head, draft_head, vocabulary)

    def _heads(self, device: torch.device) -> tuple[TargetHead, TargetHead]:
        """The target's head on the batch's device, and its rows of the draft vocabulary."""
        if self.target_head is None:
            raise ValueError("target_head: needed to read target_last_hidden_states")
        if self.target_head.weight_VD.device != device:
            self.target_head, self._draft_head = self.target_head.to(device), None
        if self._draft_head is None:
            vocabulary = DraftVocabulary(self.selected_token_ids, self.selected_token_mask)
            self._draft_head = head_rows(self.target_head, vocabulary)
        return self.target_head, self._draft_head
