"""P-EAGLE's attention and rollout: all depths in one pass, from a learned placeholder.

There are two implementations with the same weights. The draft's `forward_peagle` is the plain one:
elements flattened by the caller, one flex-attention mask. Training uses `unroll_parallel`, which
runs on a plan (`peagle/plan.py`), shares EAGLE-3's attention primitive, and computes only
what a loss needs. Tests verify that the two agree.

Shapes: Q flat axis of a segment, M its chain rows (depths >= 1). With several ranks on the same
rows (`rollout.context`), each has its own slots O; on one rank they are the key axis.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from fledge.core.errors import BadInput
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.peagle.plan import ParallelPlan, Segment
from fledge.methods.shared.config import PLACEHOLDER_KEY
from fledge.methods.shared.layer import DeepDraftLayer, LayerWeights
from fledge.methods.shared.norms import rms_norm
from fledge.methods.shared.rotary import rope_parameters, rotate
from fledge.rollout.attention import (
    AttentionKind,
    Chains,
    KeysValues,
    attend_chains,
    dense_attention,
    gathered,
    kernel_runs,
    prefix_visible,
)
from fledge.rollout.plan import QueryRows

# --- attention ------------------------------------------------------------------------------------
# Visibility is as in `rollout/attention.py`: depth-0 keys up to the anchor, and the row's own
# rollout up to its own depth. Queries are the flat axis Q of `plan.py`: depth-0 rows first, then
# the chain rows, whose own keys and values are the chain. One pass computes the prefix of all rows;
# the chain is added per depth, with the same arithmetic as EAGLE-3's chain. On a GPU one kernel
# does both (`attention_triton.py`).
#
# `parallel_visible` is the rule as a dense matrix, `reference_parallel` the definition based on it.
#
# Shapes: Q queries, of which the last M are chain rows; T key axis.


def parallel_attention(
    q_QHC: Tensor,
    prefix: KeysValues,  # depth-0 keys and values [T, G, C]
    chain: KeysValues,  # the chain rows' own [M, G, C]
    rows: QueryRows,
    counts: Sequence[int],  # chain rows at depths 1, 2, ...: nested, see `plan.py`
    *,
    starts_K: Tensor,  # first chain row of each depth, and the end of the last
    kind: AttentionKind = "fast",
) -> Tensor:
    """The attention output [Q, H, C], in the dtype of q."""
    if kind == "reference":
        return reference_parallel(q_QHC, prefix, chain, rows, counts)
    if kernel_runs(q_QHC, *prefix, *chain):
        from fledge.rollout.attention_triton import fused_parallel

        return fused_parallel(q_QHC, prefix, chain, rows, counts, starts_K)
    return attend_chains(q_QHC, prefix, [chain], rows, _own_chains(len(rows), counts))


def parallel_visible(rows: QueryRows, counts: Sequence[int], num_keys: int) -> Tensor:
    """[Q, T + M]: which depth-0 slots and which chain rows each query sees."""
    device = rows.slot_N.device
    depth_M = torch.repeat_interleave(
        torch.arange(1, len(counts) + 1, device=device), torch.tensor(counts, device=device).long()
    )
    depth_Q = torch.cat([depth_M.new_zeros(len(rows) - len(depth_M)), depth_M])
    anchor_M = rows.slot_N[len(rows) - len(depth_M) :]
    own_chain = (rows.slot_N[:, None] == anchor_M) & (depth_M <= depth_Q[:, None])
    return torch.cat([prefix_visible(rows, num_keys), own_chain], dim=1)


def reference_parallel(
    q_QHC: Tensor, prefix: KeysValues, chain: KeysValues, rows: QueryRows, counts: Sequence[int]
) -> Tensor:
    """The definition, by `parallel_visible`."""
    keys, values = (torch.cat(pair) for pair in zip(prefix, chain, strict=True))
    return dense_attention(q_QHC, keys, values, parallel_visible(rows, counts, len(prefix[0])))


def _own_chains(num_rows: int, counts: Sequence[int]) -> Chains:
    """For each depth d: its queries on the Q axis, and its rollouts' chain rows at depths 1..d.

    Rollouts are in the same order at every depth, so those that reach depth d come first at each
    shallower depth.
    """
    starts = [sum(counts[:depth]) for depth in range(len(counts))]
    first, chains = num_rows - sum(counts), []
    for depth, count in enumerate(counts):
        begin = first + starts[depth]
        places = [(0, slice(start, start + count)) for start in starts[: depth + 1]]
        chains.append((slice(begin, begin + count), places))
    return [chain for chain, count in zip(chains, counts, strict=True) if count]


# --- rollout --------------------------------------------------------------------------------------

# MLP activations that are kept even if little memory is free. The gradients of several layers and
# of the embedding leave less than EAGLE-3 has.
KEPT_MLP_GIB = 1.5


def unroll_parallel(
    draft: LlamaEagle3DraftModel,
    aux_OD: Tensor,  # [O, 3 * D]: on the plan's key axis, or this rank's part of it
    input_ids_O: Tensor,
    plan: ParallelPlan,
    *,
    compute_dtype: torch.dtype | None = None,
    attention: AttentionKind = "fast",
) -> Tensor:
    """Head inputs (after the final norm), rows of all depths end to end in the plan's order.

    With several segments, the activations of each are dropped and recomputed in the backward pass,
    one segment at a time; only keys and values of depth 0 are passed on between segments.
    """
    draft.check_parallel()
    dtype = compute_dtype or draft.fc.weight.dtype
    step = _ParallelStep(draft, plan, dtype, attention)
    # filled on the device: no copy from the host
    mask_id = input_ids_O.new_full((1,), draft.spec.mask_id)
    embedding = F.embedding(torch.cat([input_ids_O, mask_id]), draft.embed_tokens.weight)
    token = step.layers[0].token_part(embedding.to(dtype))
    assert token is not None
    aux = torch.cat([aux_OD.to(dtype), draft.mask_hidden.reshape(1, -1).to(dtype)])
    state = draft.project_hidden_states(aux, dtype)
    outputs: list[Tensor] = []
    earlier: list[tuple[KeysValues, ...]] = [() for _ in step.layers]
    for segment in plan.segments:
        output, keys_values = step.segment(segment, state, token, earlier)
        outputs.append(output)
        earlier = [(*before, pair) for before, pair in zip(earlier, keys_values, strict=True)]
    return plan.in_order(torch.cat(outputs))


class _ParallelStep:
    """One pass over a plan: the weights in the step's dtype, and how a segment runs through them.

    At layer 0 all chain rows read the same two vectors, so they are equal until rotation and need
    only one row: a "folded" tensor ends in that row, and `_unfold` repeats it M times.
    """

    def __init__(
        self,
        model: LlamaEagle3DraftModel,
        plan: ParallelPlan,
        dtype: torch.dtype,
        attention: AttentionKind,
    ) -> None:
        self.model, self.plan, self.kind, self.dtype = model, plan, attention, dtype
        rows = max(len(segment.every) for segment in plan.segments)
        self.layers = model.step_weights(
            dtype, rows, kept_gib=KEPT_MLP_GIB, used_once=len(plan.segments) == 1
        )
        self.norm = model.norm_weight(dtype)

    def segment(
        self, segment: Segment, state: Tensor, token: Tensor, earlier: list[tuple[KeysValues, ...]]
    ) -> tuple[Tensor, list[KeysValues]]:
        """Last-layer rows after the final norm, and each layer's own depth-0 keys and values."""
        state, token = (torch.cat([x[segment.begin : segment.end], x[-1:]]) for x in (state, token))
        if len(self.plan.segments) == 1 or not torch.is_grad_enabled():
            return self._segment(segment, state, token, earlier)
        result: tuple[Tensor, list[KeysValues]] = checkpoint(
            self._segment, segment, state, token, earlier,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        return result

    def _segment(
        self,
        segment: Segment,
        state: Tensor,
        token: Tensor | None,
        earlier: list[tuple[KeysValues, ...]],
    ) -> tuple[Tensor, list[KeysValues]]:
        slots = slice(segment.begin, segment.end)
        position_Q = torch.cat([self.plan.position_L[slots], segment.chain_position_M])
        turn = self.model.rotary(position_Q, self.dtype)
        keys_values = []
        for index, layer in enumerate(self.layers):
            state, keys, values = self.model._run_draft_layer(
                self._layer, layer, index, segment, state, token, turn, earlier[index]
            )
            keys_values.append((keys, values))
            token = None
        return rms_norm(state, self.norm, self.model.spec.rms_norm_eps), keys_values

    def _layer(
        self,
        layer: LayerWeights,
        index: int,
        segment: Segment,
        state: Tensor,
        token: Tensor | None,
        turn: tuple[Tensor, Tensor],
        earlier: tuple[KeysValues, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States of the rows with queries, after the layer; depth-0 keys and values of slots."""
        slots = segment.end - segment.begin
        normed = layer.normed(state)
        kv = self._unfold(layer.project(normed, token, slice(layer.q_size, None)), segment, slots)
        keys, values = layer.heads(kv).chunk(2, dim=1)
        keys = rotate(layer.keys(keys), *turn)
        rows, depth_zero = segment.every, slots
        if index == len(self.layers) - 1:  # the output of the other rows is not used
            rows, depth_zero = segment.asking, len(segment.anchor_N)
            state, normed = _with_queries(state, segment), _with_queries(normed, segment)
            turn = (_with_queries(turn[0], segment), _with_queries(turn[1], segment))
            token = None if token is None else _with_queries(token, segment)
        q = self._unfold(layer.project(normed, token, slice(0, layer.q_size)), segment, depth_zero)
        state = self._unfold(state, segment, depth_zero)
        keys_values = prefix = gathered((keys[:slots], values[:slots]), segment.gathering)
        if len(self.plan.segments) > 1:
            if segment.gathering is None:  # a copy, so that those of the chain rows can be freed
                keys_values = (keys_values[0].clone(), keys_values[1].clone())
            keys_so_far, values_so_far = zip(*earlier, keys_values, strict=True)
            prefix = (torch.cat(keys_so_far), torch.cat(values_so_far))
        out = parallel_attention(
            rotate(layer.queries(layer.heads(q)), *turn),
            prefix,
            (keys[slots:], values[slots:]),
            rows,
            segment.counts,
            starts_K=segment.starts_K,
            kind=self.kind,
        )
        return layer.finish(state, out), *keys_values

    def _unfold(self, x: Tensor, segment: Segment, depth_zero: int) -> Tensor:
        """[depth-0 rows + 1, ...] -> [depth-0 rows + M, ...]; above layer 0 nothing is folded."""
        chain = sum(segment.counts)
        if len(x) == depth_zero + chain:
            return x
        return torch.cat([x[:depth_zero], x[depth_zero:].expand(chain, *x.shape[1:])])


def _with_queries(x: Tensor, segment: Segment) -> Tensor:
    """The rows of a segment (folded or not) with queries in the last layer: anchors and chain."""
    slots = segment.end - segment.begin
    return torch.cat([x[:slots].index_select(0, segment.anchor_N), x[slots:]])


# --- warm start ----------------------------------------------------------------------------------
# Start a P-EAGLE draft from an EAGLE-3 draft.


# Settings that change nothing in the meaning of the tensors that the two drafts have in common.
_SAME_TENSORS = {"num_hidden_layers", "parallel_drafting", PLACEHOLDER_KEY, "norm_output"}
_SAME_TENSORS |= {"hidden_act", "initializer_range"}


@torch.no_grad()
def peagle_from_eagle3(
    draft: LlamaEagle3DraftModel, config: PretrainedConfig
) -> LlamaEagle3DraftModel:
    """A draft with `config` (with `parallel_drafting`) that takes all weights of `draft`: fc, its
    layers, norm, head, embeddings and vocabulary map. `mask_hidden` and additional layers are new.

    A new layer starts with its two output projections at zero, so at depth 0 the new draft gives
    exactly the old one's output: a warm start loses nothing.
    """
    new = LlamaEagle3DraftModel(config)
    if not new.spec.parallel_drafting:
        raise ValueError("parallel_drafting: must be set in the config of a P-EAGLE draft")
    old = {**vars(draft.spec), "rope_parameters": rope_parameters(draft.config)}
    given = {**vars(new.spec), "rope_parameters": rope_parameters(new.config)}
    differing = [name for name in old if name not in _SAME_TENSORS and old[name] != given[name]]
    if len(new.layers) < len(draft.layers):
        differing.append("num_hidden_layers")
    for name in differing:
        raise BadInput(
            f"the draft to start from has {name} {old[name]}, the new one {given[name]}",
            where="draft.init_from",
            fix=f"use {name} {old[name]}",
        )
    for layer in new.layers[len(draft.layers) :]:
        assert isinstance(layer, DeepDraftLayer)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    reference = draft.fc.weight
    new.to(device=reference.device, dtype=reference.dtype)
    new.load_state_dict(new.state_dict() | draft.state_dict())
    return new
