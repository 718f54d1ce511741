"""Memory that a rank of a run needs, computed from shapes: exact for what is kept between steps,
approximate for what a step needs on top.

`predict.py` uses it for a run that is set up, `shape_plan.py` for one that is only a recipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from fledge.core.rows import TokenBatch
from fledge.objective.work import Work
from fledge.train.optimizer import trained_by_muon

if TYPE_CHECKING:
    from fledge.recipe.sections import Training

USABLE = 0.92  # share of a GPU's memory; the rest is its context, libraries and fragmentation


def draft_bytes(
    trained: int, frozen: int, *, shard: int = 1, width: int = 4, kept: int | None = None
) -> int:
    """Bytes of weights, gradients, and what else is `kept` per weight (None: AdamW's moments).
    During a step, sharded ranks also hold the whole weights, in the dtype of the step, and the
    whole gradients."""
    kept = 8 * trained if kept is None else kept
    if shard == 1:
        return 8 * trained + kept + 4 * frozen
    return (4 * trained + kept) // shard + (width + 4) * trained + 4 * frozen


def kept_bytes(draft: nn.Module, training: "Training") -> int:
    """Bytes of AdamW's two moments or Muon's one, and of the averaged weights."""
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    muon = trained_by_muon(draft).values() if training.optimizer == "muon" else ()
    average = 0 if training.ema is None else 4 * trained
    return 8 * trained - 4 * sum(p.numel() for p in muon) + average


@dataclass(frozen=True)
class StepMemory:
    """What one step needs on top, from the work of its draft and the sizes of its input."""

    work: Work
    sizes: Any  # of a micro-batch, as `work` counts them
    tokens: int  # of a micro-batch
    accumulate: int
    width: int  # bytes per element

    @classmethod
    def of(
        cls, work: Work, batches: Sequence[TokenBatch], *, accumulate: int, width: int
    ) -> "StepMemory":
        """From micro-batches, of which the largest counts."""
        sizes = max(map(work.trained, batches), key=lambda n: work.kept(n, width))
        return cls(work, sizes, batches[0].tokens, accumulate, width)

    def bytes(self, context: int = 1) -> int:
        """Bytes on one rank, if `context` ranks share their rows."""
        kept = self.work.kept(self.sizes, self.width, context)
        return int(kept + self._states(context) + self.work.chunk_bytes(self.sizes, self.width))

    def _states(self, context: int) -> float:
        """Bytes of the target's answers: two copies while one is made, then this rank's part."""
        config = self.work.config
        per_token = (config.num_aux_hidden_states + 1) * config.target_hidden_size
        answer = float(self.tokens * per_token * self.width)
        if context == 1:
            return 2 * answer * self.accumulate
        return 2 * answer + answer * self.accumulate / context


def context_needed(step: StepMemory, free_bytes: float, *, most: int = 64) -> int | None:
    """The smallest power of two of ranks over which a step fits; None if `most` are too few."""
    size = 1
    while size <= most:
        if step.bytes(size) <= free_bytes:
            return size
        size *= 2
    return None
