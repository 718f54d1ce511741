"""Operations and memory of a step, counted from shapes: for predictions and for benchmarks.

Each method names the class that describes it and the layouts of its batches (`Method.work`): the
functions with which training itself lays out rows, so what is counted is what a step computes.
Operations are those of matrix products; a multiply-add is two. Neither recomputation, which is
optional, nor padding to recurring sizes (`rollout/plan.py`) is counted. Bytes are what
autograd keeps of the draft between forward and backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fledge.core.rows import TokenBatch, shift_left
from fledge.methods.peagle import draft as parallel
from fledge.methods.peagle.plan import ParallelPlan
from fledge.methods.shared import unroll
from fledge.methods.shared.layer import forget_mlp
from fledge.methods.shared.supervision import CHUNK_SCORES
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


# --- chain work ----------------------------------------------------------------------------------
# Operations and memory of a step with rollouts of EAGLE-1, EAGLE-3 and P-EAGLE: see `work.py`.


@dataclass(frozen=True)
class Rollouts:
    """The sizes of a batch of rollouts."""

    slots: int  # of the key axis
    anchors: int  # rows of depth 0
    chain: int  # rows of all depths after it
    elements: int  # rows that are scored
    targets: int  # slots that hold a target
    pairs: int  # (query, visible key) pairs in the last layer
    lower_pairs: int  # the same in every other layer, where all slots have queries
    segments: int = 0  # that P-EAGLE runs one after another; 0: depth by depth


@dataclass(frozen=True)
class ChainWork(Work):
    """Some tokens start a rollout, of which each row runs through all layers. All tokens compute
    keys and values of depth 0, and the part of the first layer that depends only on the token."""

    draft: Any
    layouts: Layouts
    copies_states: bool  # the target's states are changed or extended before they are read

    def counted(self, plan: Any) -> Rollouts:
        """The sizes of an exact plan."""
        slots, (anchors, *deeper) = len(plan.slot_T), plan.counts
        own_keys = sum(depth * count for depth, count in enumerate(deeper, start=1))
        if isinstance(plan, ParallelPlan):
            rows = [(segment.asking, segment.every) for segment in plan.segments]
            pairs, lower_pairs = (sum(map(visible_keys, part)) for part in zip(*rows, strict=True))
            segments = len(rows)
        else:
            chain_pairs = sum(map(visible_keys, plan.depths[1:]))
            pairs, lower_pairs = (
                visible_keys(rows) + chain_pairs for rows in (plan.depths[0], plan.every)
            )
            segments = 0
        return Rollouts(
            slots=slots,
            anchors=anchors,
            chain=sum(deeper),
            elements=len(plan.head),
            targets=len(plan.target_M),
            pairs=pairs + own_keys,
            lower_pairs=lower_pairs + own_keys,
            segments=segments,
        )

    # --- operations ------------------------------------------------------------------------------

    def forward(self, n: Rollouts) -> dict[str, float]:
        """Operations by part: fc, the token's part of the first layer (EAGLE-1: of fc), layers,
        head."""
        draft, size, q_size = self.draft, self.config.hidden_size, self._q_size
        tokens = n.slots + bool(n.segments)  # P-EAGLE's placeholder is one of them
        token_size = q_size + 2 * self._kv_size if self._fused else size
        state_weights = draft.fc.weight.numel() * tokens
        if not self._fused:  # half of fc reads the token, the other half the state of every row
            state_weights = size * size * (tokens + n.chain)
        return {
            "fc": 2.0 * state_weights,
            "token": 2.0 * token_size * size * tokens,
            "layers": 2.0 * sum(self._layer(n, index) for index in range(len(draft.layers))),
            "head": 2.0 * draft.lm_head.weight.numel() * n.elements,
        }

    def _layer(self, n: Rollouts, index: int) -> float:
        """Multiply-adds of a layer, without the token's part."""
        layer, size, q_size = self.draft.layers[index], self.config.hidden_size, self._q_size
        is_last = index == len(self.draft.layers) - 1
        asking = n.anchors if is_last else n.slots  # slots that have queries
        # P-EAGLE's chain rows are all equal in the first layer, so one of them is projected
        projected = n.segments if n.segments and index == 0 else n.chain
        projections = q_size * (asking + projected) + 2 * self._kv_size * (n.slots + projected)
        after_attention = matrices([layer.self_attn.o_proj, layer.mlp]) * (asking + n.chain)
        pairs = n.pairs if is_last else n.lower_pairs
        return float(size * projections + 2 * q_size * pairs + after_attention)

    def training(self, n: Rollouts) -> float:
        """Forward and backward. The target's states have no gradient, unless they are normed or
        P-EAGLE's placeholder, which has one, is among them; nor have embeddings and head of
        EAGLE-1."""
        passes = {
            "fc": 3 if self._fused and (self.config.fc_norm or n.segments) else 2,
            "token": 3 if self._fused else 2,
            "layers": 3,
            "head": 3 if self.draft.lm_head.weight.requires_grad else 2,
        }
        return sum(passes[part] * operations for part, operations in self.forward(n).items())

    # --- memory ----------------------------------------------------------------------------------

    def kept(self, n: Rollouts, width: int, context: int = 1) -> float:
        config, layers = self.config, len(self.draft.layers)
        at_a_time = max(1, n.segments)
        numbers = self._kept_before_layers(n) + self._kept_after_layers(n)
        numbers += sum(self._kept_by_layer(n, index) for index in range(layers)) / at_a_time
        numbers += self._kept_by_mlps(n, width, context)
        keys = 2 * self._kv_size * layers * n.slots
        if n.segments > 1:  # the inputs of every segment, and keys and values for those after it
            numbers += n.slots * (config.hidden_size + self._q_size + 2 * self._kv_size) + keys
        shared = keys if context > 1 else 0  # depth-0 keys and values of all slots
        head = self.draft.lm_head.weight
        head_gradient = 4 * head.numel() * head.requires_grad
        weights = self._kept_weights(width)
        return float((numbers / context + shared + weights) * width + head_gradient)

    def _kept_before_layers(self, n: Rollouts) -> float:
        """Inputs of the products with tokens and states, and of their norms; cos and sin."""
        config, tokens = self.config, 1
        if self._fused:
            trained = self.draft.embed_tokens.weight.requires_grad
            tokens = 2 + self._extra_norm_copies * trained
        numbers = n.slots * tokens * config.hidden_size
        if self.copies_states:
            numbers += n.slots * config.num_aux_hidden_states * config.target_hidden_size
        return float(numbers + 2 * config.head_dim * (n.slots + n.anchors + n.chain))

    def _kept_by_layer(self, n: Rollouts, index: int) -> float:
        """Per row: the state before both norms, their outputs, q, k, v, the output of attention. A
        depth after another keeps q, k and v before rotation as well, P-EAGLE's only k and v."""
        extra, q_size, kv_size = self._extra_norm_copies, self._q_size, self._kv_size
        is_last = index == len(self.draft.layers) - 1
        asking = n.anchors if is_last else n.slots
        states = (2 + extra) * (n.slots + n.chain + asking + n.chain)
        if is_last:  # the rows that have queries are copied
            states += n.anchors + (n.chain if n.segments else 0)
        if index == 0:
            if n.segments:  # chain rows are all equal
                states -= (2 + extra) * n.chain
            elif self._fused:  # the state is also the one before the final norm
                states -= n.chain
            else:  # not normed
                states -= (1 + extra) * n.slots
        heads = 2 * q_size * (asking + n.chain) + 3 * kv_size * (n.slots + n.chain)
        if not n.segments:
            heads += q_size * n.chain
        return float(states * self.config.hidden_size + heads)

    def _kept_by_mlps(self, n: Rollouts, width: int, context: int) -> float:
        """gate and up or, if they are recomputed, also their gradients of one pass at a time."""
        config, layers, at_a_time = self.config, len(self.draft.layers), max(1, n.segments)
        lower = n.slots + n.chain
        rows = ((layers - 1) * lower + n.anchors + n.chain) / at_a_time
        if n.segments:
            all_rows, limit = layers * lower / at_a_time, parallel.KEPT_MLP_GIB
            one_pass = lower / at_a_time if layers > 1 else rows
        else:
            all_rows, limit = layers * (n.anchors + n.chain), unroll.KEPT_MLP_GIB
            one_pass = n.slots if layers > 1 else n.anchors
        dtype = {4: torch.float32, 2: torch.bfloat16}[width]
        if forget_mlp(config, int(all_rows / context), dtype, kept_gib=limit):
            return float(4 * config.intermediate_size * one_pass)
        return float(2 * config.intermediate_size * rows)

    def _kept_after_layers(self, n: Rollouts) -> float:
        """The state before the final norm, and the gradient of the head's input; EAGLE-1 has no
        norm, but compares states."""
        final = 2 + self._extra_norm_copies if self._fused else 3
        return float((n.anchors + n.chain) * final * self.config.hidden_size)

    def _kept_weights(self, width: int) -> float:
        """Weights that are cast, or put side by side, for all passes of a step."""
        if width < 4:
            return float(matrices([*self.draft.layers, self.draft.fc]))
        attention = (layer.self_attn for layer in self.draft.layers)
        return float(sum(matrices([x.q_proj, x.k_proj, x.v_proj]) for x in attention))

    @property
    def _fused(self) -> bool:
        """Whether the first layer reads token and state side by side; EAGLE-1's fc merges them."""
        return bool(self.draft.layers[0].fused)

    @property
    def _kv_size(self) -> int:
        return int(self.config.num_key_value_heads * self.config.head_dim)
