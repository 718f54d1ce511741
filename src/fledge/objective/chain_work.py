"""Operations and memory of a step with rollouts of EAGLE-1, EAGLE-3 and P-EAGLE: see `work.py`."""

from dataclasses import dataclass
from typing import Any

import torch

from fledge.draft import parallel, unroll
from fledge.draft.mlp import forget_mlp
from fledge.objective.work import Layouts, Work, matrices, visible_keys
from fledge.rollout.parallel_plan import ParallelPlan


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
