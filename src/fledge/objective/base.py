"""What a training step needs of an objective: two calls, and sums that add up.

`prepare` reads a micro-batch once, before anything is differentiated; `score` runs the draft on it.
Between the two stands what the whole step must know: how much is charged over all micro-batches and
ranks and, for a loss that weighs by it, the mean acceptance. `rollout.py` is the objective that
EAGLE-3 and P-EAGLE share; anything else that has these members trains as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.distributed import World
from fledge.core.rows import TokenBatch
from fledge.draft.base import DraftModel


class Ready(Protocol):
    """What an objective keeps of a micro-batch until it is scored: its own affair, but a count."""

    @property
    def charged_K(self) -> Tensor:  # noqa: N802  (its shape)
        """int64 per depth: the elements that pay. The step divides by their sum over everybody."""
        ...


@dataclass(frozen=True)
class RolloutOutput:
    """A micro-batch's loss and its metrics, as sums and counts on the device (no sync was made)."""

    loss: Tensor  # differentiable scalar: this micro-batch's share of the step's loss
    # Per depth [K]: over charged elements
    loss_sums: Tensor  # fp32
    charged: Tensor
    correct: Tensor
    # Per depth [K]: over slots
    step_valid: Tensor  # supervised at all depths <= k
    step_reached: Tensor  # of those, right at all depths < k
    step_prefix_hits: Tensor  # of those, right at all depths <= k

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
        """[K]: right at depth k given right at all depths before."""
        return self.step_prefix_hits / self.step_reached.clamp_min(1)


ReadyT = TypeVar("ReadyT", bound=Ready)


class Objective(Protocol[ReadyT]):
    """A draft and what it is trained for.

    One that has `reads_target` and says False reads nothing of a target's answer but the aux
    states; in training it may be given no more (`Eagle3TargetBackend.features`).
    """

    @property
    def draft_model(self) -> DraftModel: ...

    @property
    def depths(self) -> int:
        """Depths of a rollout: the length K of every per-depth count."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of the step's matrices; None: the parameters'."""
        ...

    def prepare(self, rows: TokenBatch, answer: Eagle3TargetBatch, seed: int) -> ReadyT:
        """Read a micro-batch: `rows` on the host, not shifted; the target's `answer` about them on
        the device, and perhaps still being computed, so nothing here may wait for it.

        `seed` decides what is sampled, where something is. It is the same for all micro-batches and
        ranks of a step, so that neither resuming nor cutting changes what is sampled.
        """
        ...

    def acceptance(self, ready: Sequence[ReadyT], world: World) -> Tensor | None:
        """The mean acceptance over all micro-batches and ranks of a step, handed to `score` as it
        is; None where the loss does not weigh by it. All ranks call it together."""
        ...

    def score(
        self, ready: ReadyT, normalizer: Tensor, acceptance: Tensor | None = None
    ) -> RolloutOutput:
        """The loss divided by `normalizer` ([K], the step's sum of `charged_K`), and metrics."""
        ...
