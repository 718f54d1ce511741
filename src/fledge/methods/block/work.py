"""Operations and memory of a step with blocks: see `work.py`."""

from dataclasses import dataclass
from typing import Any

import torch

from fledge.methods.block.draft import KEPT_MLP_GIB
from fledge.methods.shared.layer import kept_mlps
from fledge.methods.shared.work import CHUNK, Layouts, Work, matrices


@dataclass(frozen=True)
class Blocks:
    """The sizes of a batch of blocks."""

    tokens: int  # of the context
    blocks: int
    picked: int  # slots that go through all of the last layer
    elements: int  # tokens that are predicted and scored
    targets: int  # slots whose target the loss needs
    pairs: float  # (query, visible key) pairs in one layer


@dataclass(frozen=True)
class BlockWork(Work):
    """Blocks start at some of the tokens. Each runs `block_size` rows through all layers; of the
    context, each layer computes keys and values once. The head is frozen: its weight has no
    gradient."""

    draft: Any  # BlockDraftModel; torch does not type its layers
    layouts: Layouts
    by_target: bool  # the loss reads the target's distribution

    def counted(self, plan: Any) -> Blocks:
        """The sizes of a `BlockPlan`. Sliding layers are counted as if they were not sliding."""
        rows = plan.blocks
        slot, first = rows.ends_host
        before = int((slot - first + 1).sum()) * rows.size
        inside = rows.size * (rows.size + 1) / 2 if self.config.causal else rows.size**2
        return Blocks(
            tokens=len(plan.slot_T),
            blocks=len(rows),
            picked=len(plan.element_P),
            elements=len(plan.head),
            targets=len(plan.target_M),
            pairs=before + len(rows) * inside,
        )

    def target_logits(self, n: Blocks) -> float:
        return float(self.config.draft_vocab_size * n.targets) if self.by_target else 0.0

    def forward(self, n: Blocks) -> dict[str, float]:
        """Operations by part: fc, layers, the frozen head, and the small heads that are trained."""
        config, draft = self.config, self.draft
        rows, size, width = n.blocks * config.block_size, config.hidden_size, self._q_size
        keys = 2 * config.num_key_value_heads * config.head_dim
        per_layer = matrices(draft.layers) / len(draft.layers)
        full_layer = 2 * per_layer * rows + 2 * size * keys * n.tokens + 4 * width * n.pairs
        after_attention = matrices([draft.layers[-1].self_attn.o_proj, draft.layers[-1].mlp])
        # placeholders are all equal: the first layer projects only one of them
        repeated = rows - n.blocks - 1 if n.blocks else 0
        qkv = size * (width + keys)
        small = 0.0
        if draft.token_head is not None:
            small += config.draft_vocab_size * config.markov_rank
        if draft.confidence_head is not None:
            small += draft.confidence_head.proj.weight.numel()
        return {
            "fc": 2.0 * draft.fc.weight.numel() * n.tokens,
            "layers": len(draft.layers) * full_layer
            - 2 * after_attention * (rows - n.picked)
            - 2 * qkv * repeated,
            "head": 2.0 * config.draft_vocab_size * size * n.elements,
            "small heads": 2 * small * n.elements,
        }

    def training(self, n: Blocks) -> float:
        """Forward and backward. Neither the input of fc nor the head's weight has a gradient."""
        parts = self.forward(n)
        frozen = 2 * (parts["fc"] + parts["head"])
        return frozen + 3 * (parts["layers"] + parts["small heads"])

    def kept(self, n: Blocks, width: int, context: int = 1) -> float:
        """Of weights, autograd keeps only the masters. Rows are never shared."""
        config = self.config
        rows, norm = n.blocks * config.block_size, 1 + self._extra_norm_copies
        numbers = self._kept_by_layers(n) + self._kept_by_mlps(n, width)
        numbers += n.tokens * (1 + norm) * config.hidden_size  # output of fc, and the context
        numbers += (rows + n.tokens) * 2 * config.head_dim  # cos and sin
        numbers += n.picked * norm * config.hidden_size  # before the last norm
        numbers += n.elements * config.hidden_size  # gradients of the head's inputs
        return float(numbers * width) + self._kept_by_small_heads(n, width)

    def _kept_by_layers(self, n: Blocks) -> float:
        """Per row: the state before both norms, q, k, v, and the output of attention, of which the
        last layer picks some rows. Per token of the context: k and v."""
        config, extra, layers = self.config, self._extra_norm_copies, len(self.draft.layers)
        rows, keys = n.blocks * config.block_size, config.num_key_value_heads * config.head_dim
        per_row = (1 + extra) * (self._q_size + keys) + keys + self._q_size + config.hidden_size
        numbers = layers * (rows * per_row + n.tokens * (2 + extra) * keys)
        numbers += (layers - 1) * rows * config.hidden_size
        return float(numbers + n.picked * (config.hidden_size + self._q_size))

    def _kept_by_mlps(self, n: Blocks, width: int) -> float:
        """gate and up of the last layers; the other layers recompute them."""
        rows, dtype = (
            n.blocks * self.config.block_size,
            {4: torch.float32, 2: torch.bfloat16}[width],
        )
        kept = kept_mlps(
            self.config, int(rows), dtype, layers=len(self.draft.layers), kept_gib=KEPT_MLP_GIB
        )
        slots = (kept - 1) * rows + n.picked if kept else 0.0
        return float(2 * self.config.intermediate_size * slots)

    def _kept_by_small_heads(self, n: Blocks, width: int) -> float:
        """Gradients of the Markov head's two factors, and in float32 the inputs of the confidence
        head."""
        config, kept = self.config, 0.0
        if self.draft.token_head is not None:
            rank = config.markov_rank
            kept += n.elements * rank * width
            kept += config.draft_vocab_size * rank * 4
        if self.draft.confidence_head is not None:
            kept += n.elements * self.draft.confidence_head.proj.in_features * 4
        return kept

    def chunk_bytes(self, n: Blocks, width: int) -> float:
        """Logits, which are overwritten by their gradient, and on a CPU a temporary copy of them.
        With the target's distribution: that in float32, and on a CPU the temporaries that compare
        the two."""
        copies = 2 if width == 4 else 1
        scores = float(n.elements * self.config.draft_vocab_size)
        if self.by_target:
            return min(CHUNK, scores * (copies * width + 4 * 2 * copies))
        return min(CHUNK / 2, scores * copies * width)
