"""Operations and memory of a step, counted from shapes: for predictions and for benchmarks.

Each method names the class that describes it (`Method.work`). Operations are those of matrix
products; a multiply-add is two. Recomputation is not counted, since it is optional. Bytes are what
autograd keeps of the draft between forward and backward.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from fledge.draft.mlp import forget_mlp
from fledge.objective.supervision import CHUNK_SCORES

SUPERVISED = 0.8  # a typical share of the tokens; unsupervised ones cost almost nothing
CHUNK = 4 * CHUNK_SCORES * 4.0  # logits, probabilities and gradients in float32
_KEPT_MLP_GIB = 2.5  # beyond this, the backward pass of a chain recomputes MLPs


class Work(ABC):
    """The work of training one draft with one objective."""

    draft: Any  # a DraftModel, possibly on the meta device

    @property
    def config(self) -> Any:
        return self.draft.config

    # --- predicted, for a pack with the typical share supervised; `seen`: keys per query ---------

    @abstractmethod
    def step(self, seen: float = 0.0) -> float:
        """Operations per token, forward and backward."""

    @abstractmethod
    def scored(self, seen: float = 0.0) -> float:
        """Operations per token in evaluation: forward only."""

    @abstractmethod
    def replayed(self, seen: float = 0.0) -> float:
        """Operations per token of a replayed text, where every token starts a rollout."""

    @abstractmethod
    def kept_bytes(self, tokens: int, width: int, context: int = 1) -> float:
        """Bytes that layers keep of a micro-batch, in numbers of `width` bytes, on one of `context`
        ranks that share its rows; and the buffers in which the loss accumulates gradients."""

    def chunk_bytes(self, tokens: int, width: int) -> float:
        """Bytes that the loss holds while a chunk of logits exists."""
        return CHUNK

    # --- counted, for a batch that is planned ----------------------------------------------------

    @abstractmethod
    def planned(self, plan: Any, seen: float) -> float:
        """Operations of a step on exactly this plan, forward and backward; `seen` is the average
        number of keys that one of its tokens sees."""

    @abstractmethod
    def target_logits(self, plan: Any) -> float:
        """How many of the target's logits the loss needs for this plan."""


def matrices(modules: Any) -> int:
    """The number of weights in matrices: multiply-adds per row."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim == 2)


@dataclass(frozen=True)
class ChainWork(Work):
    """Every supervised token starts a rollout of `depths` elements, each of which runs through all
    layers and the draft's own head: EAGLE-1, EAGLE-3, and P-EAGLE (whose elements run in parallel).
    """

    draft: Any
    depths: int

    def _forward(self, share: float, seen: float) -> float:
        """Multiply-adds per token, if this share of the tokens starts a rollout."""
        config, draft = self.config, self.draft
        width = config.num_attention_heads * config.head_dim
        attention = 2 * width * seen * config.num_hidden_layers
        element = matrices(draft.layers) + attention + draft.lm_head.weight.numel()
        return float(share * self.depths * element + draft.fc.weight.numel())

    def step(self, seen: float = 0.0) -> float:
        return 6 * self._forward(SUPERVISED, seen)

    def scored(self, seen: float = 0.0) -> float:
        return 2 * self._forward(SUPERVISED, seen)

    def replayed(self, seen: float = 0.0) -> float:
        return 2 * self._forward(1.0, seen)

    def kept_bytes(self, tokens: int, width: int, context: int = 1) -> float:
        """Kept per token and depth: q, k, v, the output of attention, gate and up of the MLP, and
        norms. Depth-0 keys and values of all slots are on every rank."""
        config, rows = self.config, tokens * self.depths / context
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        per_row = heads * config.head_dim + 5 * config.hidden_size
        mlp = rows * 2 * config.intermediate_size
        dtype = torch.float32 if width == 4 else torch.bfloat16
        supervised = int(SUPERVISED * rows * config.num_hidden_layers)
        if forget_mlp(config, supervised, dtype, kept_gib=_KEPT_MLP_GIB):
            # recomputed, one depth of one layer at a time: gate, up and both gradients
            mlp = tokens / context * 4 * config.intermediate_size / config.num_hidden_layers
        keys = 2 * tokens * config.num_key_value_heads * config.head_dim
        shared = keys if context > 1 else 0
        layers = (rows * per_row + mlp + shared) * width * config.num_hidden_layers
        head_gradient = config.draft_vocab_size * config.hidden_size * 4
        return float(layers + head_gradient)

    def planned(self, plan: Any, seen: float) -> float:
        slots, elements = len(plan.slot_T), sum(plan.counts)
        config, draft = self.config, self.draft
        width = config.num_attention_heads * config.head_dim
        total = 2.0 * float(draft.fc.weight.numel()) * slots
        for index, layer in enumerate(draft.layers):
            # lower layers run every slot at depth 0, the last one only those that are scored
            rows = elements + (slots - plan.counts[0] if index < len(draft.layers) - 1 else 0)
            total += 2 * matrices([layer]) * rows + 4 * width * seen * rows
        return 3 * (total + 2.0 * float(draft.lm_head.weight.numel()) * len(plan.head))

    def target_logits(self, plan: Any) -> float:
        """The top token needs the whole vocabulary, the probabilities the draft's."""
        return float((self.config.vocab_size + self.config.draft_vocab_size) * len(plan.target_M))
