"""The interface between a training step and an objective.

`prepare` reads a micro-batch once, before anything is differentiated; `score` runs the draft on it.
Between the two calls the step computes what depends on all micro-batches and ranks: how many
elements are charged and, for losses that depend on more than that, the `totals`. All objectives in
this package are a `RolloutTrainerModule`; any class with these members can be trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.distributed import World
from fledge.core.head import HeadLike
from fledge.core.rows import TokenBatch
from fledge.methods.shared.draft import DraftModel
from fledge.rollout.attention import AttentionKind
from fledge.rollout.context import ContextRanks


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed, as opposed to what a draft is trained for."""

    target_head: HeadLike | None = None  # needed to read hidden supervision
    compute_dtype: torch.dtype | None = None  # of matrix products; None: that of the parameters
    chunk_rows: int | None = None  # rows of logits that exist at a time; None: as many as fit
    attention: AttentionKind = "fast"
    context: ContextRanks | None = None  # the ranks that train on the same rows

    def __post_init__(self) -> None:
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"chunk_rows: must be positive, got {self.chunk_rows!r}")


class Ready(Protocol):
    """What an objective keeps of a micro-batch until it is scored; steps read only the count."""

    @property
    def charged_K(self) -> Tensor:  # noqa: N802  (its shape)
        """Charged elements per depth, int64. The step divides by their sum over all micro-batches
        and ranks."""
        ...


@dataclass(frozen=True)
class RolloutOutput:
    """A micro-batch's loss and metrics, as sums and counts on the device (no synchronization)."""

    loss: Tensor  # differentiable scalar: this micro-batch's share of the step's loss
    # Per depth [K]: over charged elements
    loss_sums: Tensor  # fp32
    charged: Tensor
    correct: Tensor
    # Per depth [K]: over slots
    step_valid: Tensor  # supervised at all depths <= k
    step_reached: Tensor  # of those, correct at all depths < k
    step_prefix_hits: Tensor  # of those, correct at all depths <= k

    @property
    def valid_tokens(self) -> Tensor:
        """Charged elements over all depths, int64."""
        return self.charged.sum()

    @property
    def accuracy(self) -> Tensor:
        """Correct / charged over all depths."""
        return self.correct.sum() / self.valid_tokens.clamp_min(1)

    @property
    def conditional_accuracy(self) -> Tensor:
        """[K]: accuracy at depth k among slots that were correct at all depths before."""
        return self.step_prefix_hits / self.step_reached.clamp_min(1)


@dataclass(frozen=True)
class StepTotals:
    """What a loss depends on besides its micro-batch: figures of the draft's own outputs over all
    micro-batches and ranks of a step. No gradient flows through them."""

    # [L] mean acceptance of the charged elements of each loss, for a loss that is weighted by it
    acceptance_L: Tensor | None = None
    # scalar: sum of the weights of all elements, where these follow from the draft (D-PACE)
    weight_sum: Tensor | None = None
    # scalar: sum of the weights of all elements whose right tokens are candidates, for heads that
    # choose among candidates
    found_sum: Tensor | None = None


ReadyT = TypeVar("ReadyT", bound=Ready)


class Objective(Protocol[ReadyT]):
    """A draft and the objective it is trained for."""

    depths: int  # of a rollout: the length K of all per-depth counts
    compute_dtype: torch.dtype | None  # of the step's matrix products; None: the parameters'

    @property
    def draft_model(self) -> DraftModel: ...

    @property
    def reads_target(self) -> bool:
        """Whether the loss reads the target's distribution. If not, it reads only the aux states of
        the target's answer, and training may request no more (`Eagle3TargetBackend.features`)."""
        ...

    def begin_step(self, done: float) -> None:
        """Called before each training step with the share of all steps that are done."""
        ...

    def prepare(self, rows: TokenBatch, answer: Eagle3TargetBatch, seed: int) -> ReadyT:
        """Read a micro-batch: `rows` are on the host, not shifted; the target's `answer` about them
        is on the device. Its computation may still be in progress, so nothing here may wait for it.

        `seed` determines all sampling. It is the same for all micro-batches and ranks of a step, so
        that neither resuming nor splitting a step differently changes what is sampled.
        """
        ...

    def totals(self, ready: Sequence[ReadyT], world: World) -> StepTotals | None:
        """What `score` needs to know about the whole step besides the number of charged elements;
        None if it needs nothing. All ranks must call it together."""
        ...

    def score(
        self, ready: ReadyT, normalizer: Tensor, totals: StepTotals | None = None
    ) -> RolloutOutput:
        """The loss, divided by `normalizer` ([K], the step's sum of `charged_K`), and metrics.
        Without `totals`, this micro-batch is the whole step."""
        ...
