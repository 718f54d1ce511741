"""What a step of blocks computes and keeps: see `work.py`."""

from dataclasses import dataclass
from typing import Any

import torch

from fledge.draft.block import KEPT_MLP_GIB
from fledge.draft.mlp import kept_mlps
from fledge.objective.work import CHUNK, SUPERVISED, Work, matrices
from fledge.rollout.block_plan import ANCHOR_TOKENS


@dataclass(frozen=True)
class Blocks:
    """How much of everything there is in a batch of blocks."""

    tokens: float  # of the context
    blocks: float
    picked: float  # slots that go through all of the last layer
    elements: float  # tokens that are foretold and scored
    pairs: float  # of a query and a key that it sees, in one layer


@dataclass(frozen=True)
class BlockWork(Work):
    """Blocks at some tokens: `block_size` rows each through all layers, beside the context, of
    which each layer makes keys and values once. The head is frozen: no gradient of its weight."""

    draft: Any  # BlockDraftModel, whose layers torch gives no types
    anchors: int
    by_target: bool  # the loss reads the target's distribution

    # --- exact, given the counts -----------------------------------------------------------------

    def forward(self, n: Blocks) -> dict[str, float]:
        """Operations by part: fc, layers, the frozen head, and the small heads that are trained."""
        config, draft = self.config, self.draft
        rows, size, width = n.blocks * config.block_size, config.hidden_size, self._heads
        keys = 2 * config.num_key_value_heads * config.head_dim
        per_layer = matrices(draft.layers) / len(draft.layers)
        one = 2 * per_layer * rows + 2 * size * keys * n.tokens + 4 * width * n.pairs
        behind = matrices([draft.layers[-1].self_attn.o_proj, draft.layers[-1].mlp])
        alike = rows - n.blocks - 1 if n.blocks else 0  # placeholders, which the first layer reads
        first = size * (width + keys)
        small = 0.0
        if draft.markov_head is not None:
            small += config.draft_vocab_size * config.markov_rank
        if draft.confidence_head is not None:
            small += draft.confidence_head.proj.weight.numel()
        return {
            "fc": 2.0 * draft.fc.weight.numel() * n.tokens,
            "layers": len(draft.layers) * one - 2 * behind * (rows - n.picked) - 2 * first * alike,
            "head": 2.0 * config.draft_vocab_size * size * n.elements,
            "small heads": 2 * small * n.elements,
        }

    def training(self, n: Blocks) -> float:
        """Forward and backward: the gradient of fc's input is nobody's, nor that of the head."""
        parts = self.forward(n)
        frozen = 2 * (parts["fc"] + parts["head"])
        return frozen + 3 * (parts["layers"] + parts["small heads"])

    def kept(self, n: Blocks, width: int) -> float:
        """Bytes that autograd keeps of such a batch: of weights nothing but their masters."""
        config = self.config
        rows, norm = n.blocks * config.block_size, 1 + self._twice_kept
        numbers = self._kept_by_layers(n) + self._kept_by_mlps(n, width)
        numbers += n.tokens * (1 + norm) * config.hidden_size  # fc's output, and the context
        numbers += (rows + n.tokens) * 2 * config.head_dim  # cos and sin
        numbers += n.picked * norm * config.hidden_size  # before the last norm
        numbers += n.elements * config.hidden_size  # the gradient that the head leaves
        return float(numbers * width) + self._kept_by_small_heads(n, width)

    def _kept_by_layers(self, n: Blocks) -> float:
        """Of a row: the state before both norms, q, k, v, and what attention says, which the last
        layer picks from. Of a token of the context: k and v."""
        config, more, layers = self.config, self._twice_kept, len(self.draft.layers)
        rows, keys = n.blocks * config.block_size, config.num_key_value_heads * config.head_dim
        per_row = (1 + more) * (self._heads + keys) + keys + self._heads + config.hidden_size
        numbers = layers * (rows * per_row + n.tokens * (2 + more) * keys)
        numbers += (layers - 1) * rows * config.hidden_size
        return float(numbers + n.picked * (config.hidden_size + self._heads))

    def _kept_by_mlps(self, n: Blocks, width: int) -> float:
        """gate and up, of the last layers."""
        rows, dtype = (
            n.blocks * self.config.block_size,
            {4: torch.float32, 2: torch.bfloat16}[width],
        )
        kept = kept_mlps(
            self.config, int(rows), dtype, layers=len(self.draft.layers), kept_gib=KEPT_MLP_GIB
        )
        slots = (kept - 1) * rows + n.picked if kept else 0.0
        return float(2 * self.config.intermediate_size * slots)

    @property
    def _twice_kept(self) -> int:
        """1 where a norm is several operations, which keep what they norm before and after: CPUs
        have no single one."""
        return int(self.draft.device.type == "cpu")

    def _kept_by_small_heads(self, n: Blocks, width: int) -> float:
        """In the step's precision what the loss left of the Markov head's two factors, in float32
        what the confidence head reads."""
        config, kept = self.config, 0.0
        if self.draft.markov_head is not None:
            rank = config.markov_rank
            kept += n.elements * rank * width
            kept += config.draft_vocab_size * rank * 4
        if self.draft.confidence_head is not None:
            kept += n.elements * self.draft.confidence_head.proj.in_features * 4
        return kept

    @property
    def _heads(self) -> int:
        return int(self.config.num_attention_heads * self.config.head_dim)

    # --- on average ------------------------------------------------------------------------------

    def _usual(self, tokens: float, seen: float, share: float | None = None) -> Blocks:
        """In so many tokens; `share` of them start a block (None: as many as training draws)."""
        size = self.config.block_size
        if share is None:
            share = min(self.anchors / ANCHOR_TOKENS, SUPERVISED)
        blocks = share * tokens
        pairs = blocks * size * (seen + size) if seen else 0.0
        elements = blocks * self.draft.drafts
        return Blocks(tokens, blocks, elements, elements, pairs)

    def step(self, seen: float = 0.0) -> float:
        return self.training(self._usual(1.0, seen))

    def scored(self, seen: float = 0.0) -> float:
        return sum(self.forward(self._usual(1.0, seen)).values())

    def replayed(self, seen: float = 0.0) -> float:
        return sum(self.forward(self._usual(1.0, seen, SUPERVISED)).values())

    def kept_bytes(self, tokens: int, width: int, context: int = 1) -> float:
        return self.kept(self._usual(tokens, 0.0), width)  # rows are never shared

    def chunk_bytes(self, tokens: int, width: int) -> float:
        """Logits that become their own gradient; on a CPU a copy of them for a moment. With the
        target's distribution, that in float32, and on a CPU what compares the two."""
        copies = 2 if width == 4 else 1
        scores = float(self._usual(tokens, 0.0).elements * self.config.draft_vocab_size)
        if self.by_target:
            return min(CHUNK, scores * (copies * width + 4 * 2 * copies))
        return min(CHUNK / 2, scores * copies * width)

    def planned(self, plan: Any, seen: float) -> float:
        return self.training(self.counted(plan))

    def counted(self, plan: Any) -> Blocks:
        """Of a `BlockPlan`. Layers that slide are counted as if they did not."""
        rows = plan.blocks
        slot, first = rows.ends_host
        before = int((slot - first + 1).sum()) * rows.size
        own = rows.size * (rows.size + 1) / 2 if self.config.causal else rows.size**2
        pairs = before + len(rows) * own
        return Blocks(len(plan.slot_T), len(rows), len(plan.element_P), len(plan.head), pairs)

    def target_logits(self, plan: Any) -> float:
        return float(self.config.draft_vocab_size * len(plan.target_M)) if self.by_target else 0.0
