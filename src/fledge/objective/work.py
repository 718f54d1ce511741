"""Operations and memory of a step, counted from shapes: for predictions and for benchmarks.

Each method names the class that describes it and the layouts of its batches (`Method.work`): the
functions with which training itself lays out rows, so what is counted is what a step computes.
Operations are those of matrix products; a multiply-add is two. Neither recomputation, which is
optional, nor padding to recurring sizes (`rollout/even.py`) is counted. Bytes are what autograd
keeps of the draft between forward and backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fledge.core.rows import TokenBatch, shift_left
from fledge.objective.supervision import CHUNK_SCORES
from fledge.rollout.plan import QueryRows, RolloutPlan
from fledge.rollout.slots import RowMasks

CHUNK = 4 * CHUNK_SCORES * 4.0  # logits, probabilities and gradients in float32

Layout = Callable[..., RolloutPlan]  # of masks on the host and a `seed`


class Layouts(NamedTuple):
    """How a method lays out the rows of a batch."""

    training: Layout
    evaluation: Layout  # to score held-out rows
    replay: Layout  # of a known text: nothing is sampled


class Work(ABC):
    """The work of training one draft with one objective. Sizes `n` are those of a batch, in a class
    of the method's."""

    draft: Any  # a DraftModel, possibly on the meta device
    layouts: Layouts

    @property
    def config(self) -> Any:
        return self.draft.config

    @property
    def _q_size(self) -> int:
        return int(self.config.num_attention_heads * self.config.head_dim)

    @property
    def _extra_norm_copies(self) -> int:
        """1 on CPUs, where a norm consists of several operations that keep both their input and the
        normed values; 0 where it is a single operation."""
        return int(self.draft.device.type == "cpu")

    def trained(self, rows: TokenBatch, seed: int = 0) -> Any:
        """The sizes of a training step on these rows."""
        return self.counted(self.layouts.training(_masks(rows), seed=seed))

    def step(self, rows: TokenBatch, seed: int = 0) -> float:
        """Operations of a step on these rows: the draft forward and backward, and the target's
        head."""
        n = self.trained(rows, seed)
        return self.training(n) + 2 * int(self.config.target_hidden_size) * self.target_logits(n)

    def evaluation(self, rows: TokenBatch) -> float:
        """Operations of an evaluation on these rows, which are scored and then replayed."""
        layouts = (self.layouts.evaluation, self.layouts.replay)
        plans = (layout(_masks(rows), seed=0) for layout in layouts)
        return sum(sum(self.forward(self.counted(plan)).values()) for plan in plans)

    @abstractmethod
    def counted(self, plan: Any) -> Any:
        """The sizes of a plan."""

    @abstractmethod
    def forward(self, n: Any) -> dict[str, float]:
        """Operations of the draft's forward pass by part."""

    @abstractmethod
    def training(self, n: Any) -> float:
        """Operations of the draft, forward and backward."""

    @abstractmethod
    def kept(self, n: Any, width: int, context: int = 1) -> float:
        """Bytes that layers keep, in numbers of `width` bytes, on one of `context` ranks that share
        the rows; and the buffers in which the loss accumulates gradients."""

    def target_logits(self, n: Any) -> float:
        """How many of the target's logits the loss needs. The probabilities need the draft's
        vocabulary, the top token all of it; if these are the same, every top token is covered."""
        vocab, drafted = self.config.vocab_size, self.config.draft_vocab_size
        return float(n.targets * (drafted if drafted == vocab else vocab + drafted))

    def chunk_bytes(self, n: Any, width: int) -> float:
        """Bytes that the loss holds while a chunk of logits exists. In float32: the target's
        distributions and, per element, a copy of one, logits and their gradient."""
        scores = float(self.config.draft_vocab_size * (4 * n.elements + n.targets))
        return min(CHUNK, 4 * scores)


class Elements(NamedTuple):
    """The sizes of a batch whose elements are all alike."""

    slots: int
    elements: int
    targets: int


@dataclass(frozen=True)
class PlainWork(Work):
    """The work of a method that says no more: every element runs through all layers and the head,
    and keeps what goes into and comes out of every matrix."""

    draft: Any
    layouts: Layouts

    def counted(self, plan: Any) -> Elements:
        return Elements(len(plan.slot_T), len(plan.head), len(plan.target_M))

    def forward(self, n: Elements) -> dict[str, float]:
        draft = self.draft
        return {
            "fc": 2.0 * matrices([draft.fc]) * n.slots,
            "layers": 2.0 * matrices([draft.layers]) * n.elements,
            "head": 2.0 * matrices([draft.lm_head]) * n.elements,
        }

    def training(self, n: Elements) -> float:
        return 3 * sum(self.forward(n).values())

    def kept(self, n: Elements, width: int, context: int = 1) -> float:
        sizes = sum(sum(p.shape) for p in self.draft.layers.parameters() if p.ndim == 2)
        head_gradient = 4 * self.draft.lm_head.weight.numel()
        return float(n.elements * sizes * width / context + head_gradient)


def _masks(rows: TokenBatch) -> RowMasks:
    return RowMasks.of(rows, shift_left(rows.loss_mask))


def matrices(modules: Any) -> int:
    """The number of weights in matrices: multiply-adds per row."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim == 2)


def visible_keys(rows: QueryRows) -> int:
    """The number of (row, depth-0 key) pairs that attention needs."""
    assert rows.sorted_host is not None
    slot, first = rows.sorted_host
    return int((slot - first + 1).sum())
