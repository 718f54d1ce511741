"""The rollout of drafts that carry a state from depth to depth: EAGLE-1, EAGLE-3 and native heads.

`unroll` is the complete forward pass of training and replay: the target's features in, one state
per (anchor, depth) element out. `objective` scores the states.

Shapes: N rows of a depth (see `rollout.plan`). With several ranks on the same rows
(`rollout.context`), each has the states of its own slots O and reads the tokens of slots L; on one
rank both are the key axis T.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.transfer import send
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.layer import LayerInput, LayerWeights
from fledge.methods.shared.norms import rms_norm
from fledge.methods.shared.rotary import Rotary, rotate
from fledge.rollout.attention import AttentionKind, KeysValues, gathered, rollout_attention
from fledge.rollout.plan import QueryRows, RolloutPlan
from fledge.rollout.slots import RowMasks, flatten_slots, slot_words

KEPT_MLP_GIB = 2.5  # MLP activations that are kept even if little memory is free


class UnrolledDraftModel(DraftModel):
    """Llama layers that read the next token and the target's feature or the draft's last state."""

    fc: nn.Linear
    rotary: Rotary

    @abstractmethod
    def project_hidden_states(self, aux: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., A * D] aux states of the target -> [..., E], as the first layer reads them."""

    @abstractmethod
    def norm_weight(self, dtype: torch.dtype) -> Tensor | None:
        """[E] weight of the norm before the head; None if there is no norm."""

    def unrolled_layers(self, dtype: torch.dtype, rows: int | None = None) -> Sequence[LayerInput]:
        """The layers as a rollout computes with them; given its rows in each layer, those of a step
        that is differentiated."""
        if rows is None:
            return self.layer_weights(dtype)
        return self.step_weights(dtype, rows, kept_gib=KEPT_MLP_GIB)

    def embed_at(self, token_N: Tensor, position_N: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, E] what the draft reads of the tokens after these positions."""
        return F.embedding(token_N, self.embed_tokens.weight).to(dtype)

    def unroll(
        self,
        aux_OD: Tensor,  # [O, A * D]: on the plan's key axis, or this rank's part of it
        input_ids_L: Tensor,
        plan: RolloutPlan,
        *,
        compute_dtype: torch.dtype | None = None,
        attention: AttentionKind = "fast",
    ) -> list[Tensor]:
        """Head inputs [N, E] (after the final norm) of every depth, with rows in the plan's order.

        Depth 0 reads the target's features at every slot; depth k >= 1 reads the draft's own state
        of depth k - 1 and the token k places further on, which is an index offset on the key axis.
        """
        dtype = compute_dtype or self.fc.weight.dtype
        step = _Step(self, plan, dtype, attention)
        token_L = step.layers[0].token_part(self.embed_at(input_ids_L, plan.position_L, dtype))
        assert token_L is not None
        state_NE = step.depth_zero(self.project_hidden_states(aux_OD, dtype), token_L)
        norm = self.norm_weight(dtype)
        outputs = []
        for depth, rows in enumerate(plan.depths):
            if depth > 0:
                state_NE = step.deeper(state_NE[: len(rows)], token_L, depth, rows)
            outputs.append(rms_norm(state_NE, norm, self.spec.rms_norm_eps))
            if self.spec.norm_output:
                state_NE = outputs[-1]
        return outputs

    forward = unroll


class _Step:
    """The state of one rollout: depth-0 keys and values, and the chains, for every layer."""

    def __init__(
        self,
        model: UnrolledDraftModel,
        plan: RolloutPlan,
        dtype: torch.dtype,
        attention: AttentionKind,
    ) -> None:
        self.model, self.plan, self.kind = model, plan, attention
        self.layers = model.unrolled_layers(dtype, sum(plan.counts))
        self.cos_LC, self.sin_LC = model.rotary(plan.position_L, dtype)
        self.prefix: list[KeysValues] = []
        self.chains: list[list[KeysValues]] = [[] for _ in self.layers]

    def depth_zero(self, state_OE: Tensor, token_L: Tensor) -> Tensor:
        """Run depth 0. All slots have keys and values in every layer; in the last layer, only
        anchors have queries."""
        token: Tensor | None = self._at_own_slots(token_L)
        turn = (self._at_own_slots(self.cos_LC), self._at_own_slots(self.sin_LC))
        for index, layer in enumerate(self.layers):
            rows = self.plan.depths[0] if index == len(self.layers) - 1 else self.plan.every
            state_OE, keys, values = self.model._run_draft_layer(
                self._layer_zero, layer, state_OE, token, turn, rows
            )
            self.prefix.append((keys, values))
            token = None
        return state_OE

    def deeper(self, state_NE: Tensor, token_L: Tensor, depth: int, rows: QueryRows) -> Tensor:
        """Run one depth >= 1 on the states of the depth before."""
        share = self.plan.share
        read_N = rows.slot_N if share is None else share.read_N[: len(rows)]
        slot_N = read_N + depth  # documents are contiguous: k tokens later is k places later
        token: Tensor | None = token_L.index_select(0, slot_N)
        for index, layer in enumerate(self.layers):
            # a copy of the chain: a checkpointed layer is rerun after the chain has grown
            before = tuple(self.chains[index])
            state_NE, keys, values = self.model._run_draft_layer(
                self._layer_deeper, layer, state_NE, token, rows, slot_N, self.prefix[index], before
            )
            self.chains[index].append((keys, values))
            token = None
        return state_NE

    def _at_own_slots(self, values_L: Tensor) -> Tensor:
        """[O, ...]: from the slots whose tokens this rank reads, those whose states it computes."""
        share = self.plan.share
        return values_L if share is None else values_L.index_select(0, share.own_O)

    def _whole_layer_zero(
        self,
        layer: LayerInput,
        state_OE: Tensor,
        token_O: Tensor | None,
        turn: tuple[Tensor, Tensor],
        rows: QueryRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer that can be computed only for all rows: then some are kept."""
        share, made = self.plan.share, list[KeysValues]()

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            made.append(gathered((keys, values), None if share is None else share.gathering))
            return rollout_attention(q, *made[0], self.plan.every, kind=self.kind)

        state_OE = layer.through(state_OE, token_O, turn, attend)
        if rows is not self.plan.every:
            state_OE = state_OE.index_select(0, rows.slot_N if share is None else share.anchor_N)
        return state_OE, *made[0]

    def _layer_zero(
        self,
        layer: LayerInput,
        state_OE: Tensor,
        token_O: Tensor | None,
        turn: tuple[Tensor, Tensor],
        rows: QueryRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        share = self.plan.share
        if not isinstance(layer, LayerWeights):
            return self._whole_layer_zero(layer, state_OE, token_O, turn, rows)
        state_OE, token_O = layer.enter(state_OE, token_O)
        normed_OE = layer.normed(state_OE)
        kv = layer.project(normed_OE, token_O, slice(layer.q_size, None))
        keys, values = layer.heads(kv).chunk(2, dim=1)
        own_pair = (rotate(layer.keys(keys), *turn), values)
        keys, values = gathered(own_pair, None if share is None else share.gathering)
        cos, sin = turn
        if rows is not self.plan.every:
            anchor_N = rows.slot_N if share is None else share.anchor_N
            state_OE, normed_OE = (x.index_select(0, anchor_N) for x in (state_OE, normed_OE))
            cos, sin = (x.index_select(0, anchor_N) for x in (cos, sin))
            if token_O is not None:
                token_O = token_O[:, : layer.q_size].index_select(0, anchor_N)
        q = layer.project(normed_OE, token_O, slice(0, layer.q_size))
        q = rotate(layer.queries(layer.heads(q)), cos, sin)
        out = rollout_attention(q, keys, values, rows, kind=self.kind)
        return layer.finish(state_OE, out), keys, values

    def _layer_deeper(
        self,
        layer: LayerInput,
        state_NE: Tensor,
        token_N: Tensor | None,
        rows: QueryRows,
        slot_N: Tensor,
        prefix: KeysValues,
        before: Sequence[KeysValues],
    ) -> tuple[Tensor, Tensor, Tensor]:
        made: list[KeysValues] = []

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            made.append((keys, values))
            return rollout_attention(q, *prefix, rows, chain=(*before, *made), kind=self.kind)

        turn = (self.cos_LC.index_select(0, slot_N), self.sin_LC.index_select(0, slot_N))
        state_NE = layer.through(state_NE, token_N, turn, attend)
        return state_NE, *made[0]


# --- noise on features ----------------------------------------------------------------------------
# EAGLE-1 trains with noise on features.
#
# A slot's noise is a function of the step's seed, of its document's loss mask, of its place in the
# document and of the channel, and of nothing else: padding, packing, micro-batches, ranks and
# devices do not change it. The slot's part is a word from the host (`slot_words`); the channels
# are mixed in on the device in integer arithmetic, which wraps identically everywhere.

_CHUNK = 2**23  # numbers at a time: a few arrays of 64 MB
_BITS = 24  # a float32 represents all integers of this many bits
# splitmix64's constants as signed integers, for torch's int64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, kw_only=True)
class NoisyPlan(RolloutPlan):
    word_O: Tensor | None = None  # the seed of each slot's noise; None: no noise


def noisy(plan: RolloutPlan, masks: RowMasks, seed: int) -> NoisyPlan:
    """The same plan with the noise of `seed`."""
    words = slot_words(flatten_slots(masks).documents, seed).view(np.int64)
    word_BT = send(torch.from_numpy(words), plan.slot_T.device).view(masks.loss_mask.shape)
    share = plan.share
    word_O = plan.on_key_axis(word_BT) if share is None else share.states(word_BT)
    return NoisyPlan(**vars(plan), word_O=word_O)


def uniform_noise(word_T: Tensor, width: int, bound: float) -> Tensor:
    """[T, width] fp32, uniform in [-bound, bound), from a word (int64) for each slot."""
    channel_D = torch.arange(1, width + 1, device=word_T.device) * _GOLDEN
    noise_TD = torch.empty((len(word_T), width), device=word_T.device)
    step = max(1, _CHUNK // width)
    for begin in range(0, len(word_T), step):
        rows = slice(begin, begin + step)
        bits_TD = _mix(word_T[rows, None] + channel_D)
        share_TD = _shifted(bits_TD, 64 - _BITS).float() * 2.0**-_BITS  # [0, 1)
        noise_TD[rows] = (2 * share_TD - 1) * bound
    return noise_TD


def _mix(word: Tensor) -> Tensor:
    """splitmix64's finalizer, as in `cod`."""
    word = (word ^ _shifted(word, 30)) * _FIRST
    word = (word ^ _shifted(word, 27)) * _SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shift is arithmetic."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted
