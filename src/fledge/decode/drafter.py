"""The draft as an engine runs it: keys and values kept by slot, a few new slots per call.

Slot t reads the target's aux states at token t and token t + 1, sits at position t and predicts
token t + 2 (FORMATS, slot semantics). The cache index of a slot *is* t. A rollout that starts at
anchor t leaves the keys of depth k at index t + k: what verification rejects is overwritten when
the true slots come, and "keys up to my own index" is the whole visibility rule of a chain and of
P-EAGLE's mask slots. A tree says itself who sees whom.

Shapes: B rows, Q new entries of a row, U cache entries, E draft hidden, W draft vocabulary; the
cache has L layers and K = 2, keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.decode.recorded import Passes
from fledge.draft.eagle3 import LlamaEagle3DraftModel
from fledge.draft.layer import rms_norm
from fledge.draft.rotary import rotate


@dataclass(frozen=True)
class TrueSlots:
    """Slots that the target has verified since the draft last ran, left-aligned per row."""

    aux_BQD: Tensor  # aux states of the slots' own tokens
    token_BQ: Tensor  # the tokens they read, one further on
    start_B: Tensor  # index of each row's first new slot
    count_B: Tensor  # how many of the Q are real
    used: int  # cache entries to look at: at least as far as a rollout from here goes

    @property
    def anchor_B(self) -> Tensor:  # noqa: N802  (its shape)
        """Each row's last slot: where its rollout starts."""
        return self.start_B + self.count_B - 1


class Drafter:
    """A draft and its cache, for one batch of rows at a time."""

    def __init__(
        self,
        draft: LlamaEagle3DraftModel,
        *,
        dtype: torch.dtype | None = None,
        passes: Passes | None = None,
    ) -> None:
        selected = draft.selected_token_ids
        if selected is None:
            raise ValueError("d2t: the draft has no vocabulary mapping")
        self.draft = draft.eval()
        self.dtype = dtype or draft.fc.weight.dtype
        self.device = draft.fc.weight.device
        self.passes = passes or Passes(self.device, record=False)
        self.selected_W = selected
        self.layers = draft.layer_weights(self.dtype)
        self._norm = draft.norm.weight.to(self.dtype)
        self._head = draft.lm_head.weight.to(self.dtype)
        self._cache_LKBUGC = self._empty(0, 0)

    def start(self, batch: int) -> None:
        """Empty caches for `batch` rows; they grow as they are written to."""
        rows, places = self._cache_LKBUGC.shape[2:4]
        if batch > rows:
            self._cache_LKBUGC = self._empty(batch, places)
            self.passes.forget()
        else:
            self._cache_LKBUGC.zero_()

    def _empty(self, rows: int, places: int) -> Tensor:
        """Keys and values of all layers; zeros, not garbage: a masked NaN is still a NaN."""
        config = self.draft.config
        heads, channels = config.num_key_value_heads, config.head_dim
        shape = (len(self.layers), 2, rows, places, heads, channels)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def room(self, needed: int) -> int:
        """Make room for `needed` entries of a row; how many a pass should look at."""
        used = self.passes.room(needed)
        held = self._cache_LKBUGC
        rows, places = held.shape[2:4]
        if used > places:
            self._cache_LKBUGC = self._empty(rows, max(used, 2 * places))
            self._cache_LKBUGC[:, :, :, :places] = held
            self.passes.forget()
        return used

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, moved to the front."""
        index = torch.tensor(rows, device=self.device, dtype=torch.long)
        cache = self._cache_LKBUGC
        cache[:, :, : len(rows)] = cache.index_select(2, index)

    def slots(
        self,
        aux_BQD: Tensor,
        token_BQ: Tensor,
        start_B: Sequence[int],
        count_B: Sequence[int],
        *,
        ahead: int = 0,
    ) -> TrueSlots:
        """Verified slots by plain numbers, with room for `ahead` more entries behind them."""
        used = self.room(max(start_B) + token_BQ.shape[1] + ahead)
        start, count = (torch.tensor(list(x), device=self.device) for x in (start_B, count_B))
        return TrueSlots(aux_BQD, token_BQ, start, count, used)

    def extend(self, slots: TrueSlots) -> Tensor:
        """Run verified slots with the target's true features; [B, E] at each row's anchor."""
        state_BQE = self.draft.project_hidden_states(slots.aux_BQD, self.dtype)
        place_Q = torch.arange(slots.token_BQ.shape[1], device=self.device)
        index_BQ = slots.start_B[:, None] + place_Q
        state_BQE = self.run(state_BQE, slots.token_BQ, index_BQ, used=slots.used)
        rows_B = torch.arange(len(state_BQE), device=self.device)
        return state_BQE[rows_B, slots.count_B - 1]

    def run(
        self,
        state_BQE: Tensor,
        token_BQ: Tensor,
        index_BQ: Tensor,
        *,
        used: int,
        position_BQ: Tensor | None = None,
        visible_BQU: Tensor | None = None,
    ) -> Tensor:
        """New entries through all layers; what the next depth carries ([B, Q, E]).

        `used` is at least one past the highest index, and what `room` was asked for: so much of the
        cache is looked at. Without `position_BQ` and `visible_BQU` an entry sits at its index and
        sees every index up to it.
        """
        batch, count = token_BQ.shape
        if position_BQ is None:
            position_BQ = index_BQ
        if visible_BQU is None:
            visible_BQU = torch.arange(used, device=self.device) <= index_BQ[..., None]
        embedding = F.embedding(token_BQ.flatten(), self.draft.embed_tokens.weight).to(self.dtype)
        token = self.layers[0].token_part(embedding)
        turn = self.draft.rotary(position_BQ.flatten(), self.dtype)
        rows_B1 = torch.arange(batch, device=self.device)[:, None]
        state = state_BQE.flatten(0, 1)
        for layer, (keys_BUGC, values_BUGC) in zip(
            self.layers, self._cache_LKBUGC[:, :, :batch], strict=True
        ):
            qkv = layer.project(layer.normed(state), token, slice(None))
            q, kv = qkv.tensor_split([layer.q_size], dim=1)
            keys, values = self._heads(kv).chunk(2, dim=1)
            keys_BUGC[rows_B1, index_BQ] = rotate(keys, *turn).view(batch, count, *keys.shape[1:])
            values_BUGC[rows_B1, index_BQ] = values.reshape(batch, count, *values.shape[1:])
            q_NHC = rotate(self._heads(q), *turn)
            out = _attend(
                q_NHC.view(batch, count, *q_NHC.shape[1:]), keys_BUGC, values_BUGC, visible_BQU
            )
            state = layer.finish(state, out.flatten(0, 1))
            token = None
        if self.draft.config.norm_output:
            state = self._normed(state)
        return state.view(batch, count, -1)

    def logits(self, carried: Tensor) -> Tensor:
        """[..., E] as `run` returns it -> [..., W]."""
        normed = carried if self.draft.config.norm_output else self._normed(carried)
        return F.linear(normed, self._head)

    def _normed(self, state: Tensor) -> Tensor:
        return rms_norm(state, self._norm, self.draft.config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, self.draft.config.head_dim)


def _attend(q_BQHC: Tensor, keys_BUGC: Tensor, values_BUGC: Tensor, visible_BQU: Tensor) -> Tensor:
    used, share = visible_BQU.shape[-1], q_BQHC.shape[2] // keys_BUGC.shape[2]

    def by_head(x_BUGC: Tensor) -> Tensor:
        # repeated here: the kernels that take a mask and no [Q, U] memory know no grouped heads
        return x_BUGC[:, :used].repeat_interleave(share, dim=2).transpose(1, 2)

    out_BHQC = F.scaled_dot_product_attention(
        q_BQHC.transpose(1, 2),
        by_head(keys_BUGC),
        by_head(values_BUGC),
        attn_mask=visible_BQU[:, None],
    )
    return out_BHQC.transpose(1, 2)
