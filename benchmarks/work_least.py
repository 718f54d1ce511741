"""The least that a training step computes, in closed form from the sizes of its plan.

`work_table.py` says what is counted, and compares.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import LlamaConfig

from fledge.bench.train_step import SHAPE_FIELDS, SHAPES, Case
from fledge.core.rows import TokenBatch
from fledge.methods.registry import METHODS
from fledge.rollout.plan import QueryRows
from fledge.target.layers import default_aux_layer_ids
from fledge.training.planning.step_cost import MetaStep


def target_config(case: Case) -> LlamaConfig:
    sizes = dict(zip(SHAPE_FIELDS, SHAPES[case.shape], strict=True))
    return LlamaConfig(**sizes, max_position_embeddings=65_536, tie_word_embeddings=False)


def layers_read(case: Case, reads_target: bool) -> int:
    """How many of the target's layers run."""
    depth = target_config(case).num_hidden_layers
    aux = default_aux_layer_ids(depth, METHODS[case.kind].aux_layers())
    return depth if reads_target or max(aux) >= depth else max(aux) + 1


def visible_pairs(rows: TokenBatch) -> float:
    """(query, visible key) of a causal target."""
    assert rows.doc_remaining is not None
    return float((rows.doc_remaining[rows.attention_mask != 0] + 1).sum())


@dataclass(frozen=True)
class Sizes:
    """Of the models and of the plan."""

    E: int  # hidden
    Q: int  # query heads x channels
    KV: int  # keys and values
    inner: int
    V: int
    W: int
    aux: int  # aux layers x hidden
    layers: int
    T: int  # key axis
    R: int  # rows of all depths
    X: int  # head elements
    M: int  # target slots
    pairs: float  # visible (row, key) pairs of all depths

    @classmethod
    def of(cls, config: Any, plan: Any) -> "Sizes":
        pairs = sum(visible(rows) for rows in plan.depths)
        return cls(
            config.hidden_size, config.num_attention_heads * config.head_dim,
            2 * config.num_key_value_heads * config.head_dim, config.intermediate_size,
            config.vocab_size, config.draft_vocab_size,
            config.num_aux_hidden_states * config.target_hidden_size, config.num_hidden_layers,
            len(plan.slot_T), sum(plan.counts), len(plan.head), len(plan.target_M), pairs,
        )  # fmt: skip

    @property
    def row(self) -> float:
        """Weights of a layer's output projection and MLP."""
        return self.Q * self.E + 3 * self.E * self.inner


def visible(rows: QueryRows) -> float:
    assert rows.sorted_host is not None
    slot, first = rows.sorted_host
    return float((slot - first + 1).sum())


def least_of(case: Case, step: MetaStep, plan: Any, rows: TokenBatch) -> dict[str, float]:
    """Operations by phase, and the bytes of the update."""
    objective, draft = step._objective, step._objective.draft_model
    s = Sizes.of(draft.config, plan)
    forward, backward = LEAST[case.kind](s, plan)
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    supervision = 2.0 * s.M * s.E * s.V if objective.reads_target else 0.0
    return {
        "target": least_target(case, objective.reads_target, s, rows),
        "supervision": supervision,
        "forward": forward,
        "backward": backward,
        "update": 32.0 * trained,
    }


def least_target(case: Case, reads_target: bool, s: Sizes, rows: TokenBatch) -> float:
    config, layers = target_config(case), layers_read(case, reads_target)
    tokens, width = float(rows.tokens), config.num_attention_heads * config.head_dim
    whole = config.hidden_size * (width + s.KV) + width * config.hidden_size
    whole += 3 * config.hidden_size * config.intermediate_size
    layer = 2 * tokens * whole + 4 * width * visible_pairs(rows)
    if layers < config.num_hidden_layers:
        return layers * layer  # all states of the last layer that runs are read
    share = s.M / tokens  # queries of the last layer, the last ones of every document
    assert rows.doc_remaining is not None
    asking = np.sort((rows.doc_remaining[rows.attention_mask != 0] + 1).numpy())[-s.M :]
    keys = 2 * tokens * config.hidden_size * s.KV
    last = keys + 2 * tokens * share * (whole - config.hidden_size * s.KV)
    return (layers - 1) * layer + last + 4 * width * float(asking.sum())


def chained(s: Sizes, plan: Any) -> tuple[float, float]:
    """EAGLE-3: depth by depth; embedding and target features at all slots of the key axis."""
    queried = np.zeros(s.T + len(plan.counts), dtype=bool)  # tokens that a query reads
    for depth, rows in enumerate(plan.depths):
        queried[rows.sorted_host[0] + depth] = True
    n0 = plan.counts[0]
    token = s.T * s.E * s.KV + queried[: s.T].sum() * s.E * s.Q
    states = s.T * s.E * s.KV + n0 * s.E * s.Q + (s.R - n0) * s.E * (s.Q + s.KV) + s.R * s.row
    fc, head, attention = s.T * s.aux * s.E, s.X * s.E * s.W, s.Q * s.pairs
    forward = 2 * (fc + token + states + 3 * head) + 4 * attention
    return float(forward), float(2 * (fc + token + 2 * states) + 10 * attention)


def single(s: Sizes, plan: Any) -> tuple[float, float]:
    """EAGLE-1: fc merges embedding and feature of every slot; one depth, no draft head of its
    own: the target's is frozen, and the state is regressed."""
    n0 = plan.counts[0]
    fc = s.T * 2 * s.E * s.E
    states = s.T * s.E * s.KV + n0 * s.E * s.Q + n0 * s.row
    head, attention = s.X * s.E * s.W, s.Q * s.pairs
    forward = 2 * (fc + states + 2 * head) + 4 * attention
    return float(forward), float(2 * (fc + 2 * states) + 10 * attention)


def parallel(s: Sizes, plan: Any) -> tuple[float, float]:
    """P-EAGLE: all depths at once; all chain rows read one placeholder in the first layer."""
    n0, chain = plan.counts[0], s.R - plan.counts[0]
    lower = s.T + chain
    every = visible(plan.segments[0].every)
    token = (s.T + 1) * s.E * (s.Q + s.KV)
    states = float((s.T + 1) * s.E * (s.Q + s.KV))  # of the first layer
    attention = 0.0
    for layer in range(s.layers):
        last = layer == s.layers - 1
        queries = n0 + chain if last else lower
        if layer > 0:
            states += lower * s.E * s.KV + queries * s.E * s.Q
        states += queries * s.row
        attention += s.Q * (s.pairs if last else every)
    fc, head = (s.T + 1) * s.aux * s.E, s.X * s.E * s.W
    forward = 2 * (fc + token + states + 3 * head) + 4 * attention
    # the embedding and the placeholder are trained, so token and fc have gradients of inputs
    placeholder = s.aux * s.E
    return forward, 2 * (fc + placeholder + 2 * token + 2 * states) + 10 * attention


def blocks(s: Sizes, plan: Any) -> tuple[float, float]:
    """DFlash: context keys of all slots, queries of all slots of a block but, in the last layer,
    only those that predict; the target's head, which is frozen."""
    count, size = len(plan.blocks), plan.blocks.size
    slots, wanted = count * size, len(plan.element_P)
    context = s.layers * s.T * s.E * s.KV
    slot, first = plan.blocks.ends_host
    seen = slot - first + 1 + size
    token = (count + 1) * s.E * (s.Q + s.KV)
    states = attention = 0.0
    for layer in range(s.layers):
        queries = wanted if layer == s.layers - 1 else slots
        if layer > 0:
            states += slots * s.E * s.KV + queries * s.E * s.Q
        states += queries * s.row
        attention += s.Q * float(seen.sum()) * queries / count
    fc, head = s.T * s.aux * s.E, s.X * s.E * s.W
    forward = 2 * (fc + token + context + states + 2 * head) + 4 * attention
    return forward, 2 * (fc + token + 2 * context + 2 * states) + 10 * attention


def blocks_with_token_head(s: Sizes, plan: Any, rank: int = 256) -> tuple[float, float]:
    """DSpark: also the two thin factors of the token head, both trained."""
    forward, backward = blocks(s, plan)
    return forward + 2.0 * 3 * s.X * rank * s.W, backward


LEAST = {
    "eagle3": chained,
    "eagle1": single,
    "peagle": parallel,
    "dflash": blocks,
    "dspark": blocks_with_token_head,
}
