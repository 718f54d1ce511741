"""P-EAGLE's side of the draft: a learned placeholder, and all depths of a rollout in one pass.

Two ways lead through the same weights. `forward_peagle` is the plain one: elements flattened by the
caller, one flex-attention mask. `unroll_parallel` is what training uses: it works on a plan
(`rollout.parallel_plan`), through the attention primitive that EAGLE-3 shares, and computes nothing
that no loss needs. Tests hold them equal.

Shapes: T key axis, X flat axis of a segment, M its chain rows (depths >= 1), E draft hidden.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from fledge.compat.flex_peagle import peagle_block_mask
from fledge.draft.layer import DraftLayer, LayerWeights, forget_mlp, rms_norm
from fledge.draft.rotary import Rotary, rotate
from fledge.kernels.attention.parallel import parallel_attention
from fledge.kernels.attention.reference import AttentionKind
from fledge.rollout.parallel_plan import ParallelPlan, Segment

KeysValues = tuple[Tensor, Tensor]


class ParallelDrafting(nn.Module):
    """What parallel drafting adds to the draft model, which is the only class that inherits it."""

    config: Any
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    norm: nn.RMSNorm
    fc: nn.Linear
    rotary: Rotary
    gradient_checkpointing: bool

    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        raise NotImplementedError

    def _init_peagle_parameters(self, config: Any) -> None:
        """`mask_hidden` stands in for the target's aux states at depths >= 1, before fc."""
        width = config.num_aux_hidden_states * config.target_hidden_size
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width))

    def masked_projected_hidden(self) -> Tensor:
        """[1, E]: the placeholder through fc_norm and fc, as real aux states go."""
        self._check_parallel()
        return self.project_hidden_states(self.mask_hidden).reshape(1, -1)

    def _check_parallel(self) -> None:
        if not self.config.parallel_drafting:
            raise ValueError("parallel_drafting: the draft was built without it")

    # --- one flat sequence under a mask ---------------------------------------------------------

    def build_peagle_block_mask(
        self,
        anchor_pos: Tensor,
        depth: Tensor,
        lengths: Tensor | Sequence[int],
        total_seq_len: int,
    ) -> BlockMask:
        """The mask of one row's elements, in the order in which they are given."""
        return peagle_block_mask(anchor_pos, depth, lengths, total_seq_len)

    def forward_peagle(
        self,
        sampled_input_ids: Tensor,  # [1, N]: the real token at depth 0, mask_token_id deeper
        sampled_projected_hidden: Tensor,  # [1, N, E]: fc(aux) at depth 0, the placeholder deeper
        position_ids: Tensor,  # [1, N]: anchor + depth
        block_mask: BlockMask,
    ) -> Tensor:
        """[1, N, E] what `compute_logits` takes (after the norm if `norm_output`)."""
        hidden = sampled_projected_hidden
        embeds = self.embed_tokens(sampled_input_ids).to(hidden.dtype)
        for index, layer in enumerate(self.layers):
            inputs = (embeds, hidden) if index == 0 else (hidden,)
            layer_fn: Any = layer.forward_peagle
            hidden = self._run_draft_layer(layer_fn, *inputs, position_ids, block_mask)
        if self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden

    # --- what every way through the layers shares -----------------------------------------------

    @property
    def checkpoints_layers(self) -> bool:
        """Whether layers keep nothing for the backward pass but their inputs."""
        return self.gradient_checkpointing and self.training

    def _run_draft_layer(self, layer_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; under gradient checkpointing its activations are recomputed instead."""
        if not self.checkpoints_layers:
            return layer_fn(*args, **kwargs)
        return checkpoint(layer_fn, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def layer_weights(
        self, dtype: torch.dtype, *, recompute_mlp: bool = False
    ) -> list[LayerWeights]:
        """What a step computes with, layer by layer."""
        layers = cast(Iterable[DraftLayer], self.layers)
        return [layer.weights(dtype, recompute_mlp=recompute_mlp) for layer in layers]

    # --- a plan ---------------------------------------------------------------------------------

    def unroll_parallel(
        self,
        aux_TD: Tensor,  # [T, 3 * D] on the plan's key axis
        input_ids_T: Tensor,
        plan: ParallelPlan,
        *,
        compute_dtype: torch.dtype | None = None,
        attention: AttentionKind = "fast",
    ) -> Tensor:
        """Head inputs (after the final norm) of all depths' rows end to end, as the plan orders.

        With several segments each one's activations are dropped and recomputed in the backward
        pass, one segment at a time; keys and values of depth 0 are all that is handed on.
        """
        self._check_parallel()
        if self.config.mask_token_id is None:
            raise ValueError("mask_token_id: the draft's config has none")
        dtype = compute_dtype or self.fc.weight.dtype
        step = _ParallelStep(self, plan, dtype, attention)
        mask_id = input_ids_T.new_full((1,), self.config.mask_token_id)  # a fill: nothing to copy
        embedding = F.embedding(torch.cat([input_ids_T, mask_id]), self.embed_tokens.weight)
        token = step.layers[0].token_part(embedding.to(dtype))
        assert token is not None
        aux = torch.cat([aux_TD.to(dtype), self.mask_hidden.reshape(1, -1).to(dtype)])
        state = self.project_hidden_states(aux, dtype)
        outputs: list[Tensor] = []
        earlier: list[tuple[KeysValues, ...]] = [() for _ in step.layers]
        for segment in plan.segments:
            output, own = step.segment(segment, state, token, earlier)
            outputs.append(output)
            earlier = [(*before, pair) for before, pair in zip(earlier, own, strict=True)]
        return plan.in_order(torch.cat(outputs))


class _ParallelStep:
    """One pass over a plan: the weights in the step's dtype, and how a segment runs through them.

    At layer 0 all chain rows read the same two vectors, so they are one row there until rotation
    tells them apart: a "folded" tensor ends in that one row, and `_unfold` repeats it M times.
    """

    def __init__(
        self,
        model: ParallelDrafting,
        plan: ParallelPlan,
        dtype: torch.dtype,
        attention: AttentionKind,
    ) -> None:
        self.model, self.plan, self.kind, self.dtype = model, plan, attention, dtype
        self.channels = model.config.head_dim
        rows = len(model.layers) * max(len(segment.every) for segment in plan.segments)
        # the gradients of several layers and of the embedding leave less room than EAGLE-3 has
        forget = not model.checkpoints_layers and forget_mlp(
            model.config, rows, dtype, kept_gib=1.5
        )
        self.layers = model.layer_weights(dtype, recompute_mlp=forget)
        self.norm = model.norm.weight.to(dtype)

    def segment(
        self,
        segment: Segment,
        state: Tensor,
        token: Tensor,
        earlier: list[tuple[KeysValues, ...]],
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
        position_X = torch.cat([self.plan.position_T[slots], segment.chain_position_M])
        turn = self.model.rotary(position_X, self.dtype)
        own = []
        for index, layer in enumerate(self.layers):
            state, keys, values = self.model._run_draft_layer(
                self._layer, layer, index, segment, state, token, turn, earlier[index]
            )
            own.append((keys, values))
            token = None
        return rms_norm(state, self.norm, self.model.config.rms_norm_eps), own

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
        """The rows that ask, after the layer; keys and values that the slots leave behind."""
        slots = segment.end - segment.begin
        normed = layer.normed(state)
        kv = self._unfold(layer.project(normed, token, slice(layer.q_size, None)), segment, slots)
        keys, values = self._heads(kv).chunk(2, dim=1)
        keys = rotate(keys, *turn)
        rows, asking = segment.every, slots
        if index == len(self.layers) - 1:  # nobody reads the others' output
            rows, asking = segment.asking, len(segment.anchor_N)
            state, normed = _asking(state, segment), _asking(normed, segment)
            turn = (_asking(turn[0], segment), _asking(turn[1], segment))
            token = None if token is None else _asking(token, segment)
        q = self._unfold(layer.project(normed, token, slice(0, layer.q_size)), segment, asking)
        state = self._unfold(state, segment, asking)
        left = prefix = (keys[:slots], values[:slots])
        if len(self.plan.segments) > 1:  # a copy of their own: the chain rows' need not live on
            left = (left[0].clone(), left[1].clone())
            keys_so_far, values_so_far = zip(*earlier, left, strict=True)
            prefix = (torch.cat(keys_so_far), torch.cat(values_so_far))
        out = parallel_attention(
            rotate(self._heads(q), *turn),
            prefix,
            (keys[slots:], values[slots:]),
            rows,
            segment.counts,
            kind=self.kind,
        )
        return layer.finish(state, out), *left

    def _unfold(self, x: Tensor, segment: Segment, depth_zero: int) -> Tensor:
        """[depth-0 rows + 1, ...] -> [depth-0 rows + M, ...]; above layer 0 there is no fold."""
        chain = sum(segment.counts)
        if len(x) == depth_zero + chain:
            return x
        return torch.cat([x[:depth_zero], x[depth_zero:].expand(chain, *x.shape[1:])])

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), x.shape[1] // self.channels, self.channels)


def _asking(x: Tensor, segment: Segment) -> Tensor:
    """Of a segment's rows, folded or not: the slots that ask in the last layer, and the chain."""
    slots = segment.end - segment.begin
    return torch.cat([x[:slots].index_select(0, segment.anchor_N), x[slots:]])
