"""The draft as an engine runs it: keys and values cached by slot, a few new slots per call.

Slot t reads the target's aux states at token t and token t + 1, sits at position t and predicts
token t + 2. Its cache index *is* t; a rollout from anchor t writes the keys of depth k at t + k,
which verified slots overwrite. So "keys up to my own index" is all of a chain's visibility rule.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.decode.strategy import RoundState, Strategy
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.layer import LayerInput
from fledge.methods.shared.norms import rms_norm
from fledge.methods.shared.unroll import UnrolledDraftModel


class CachedStrategy(Strategy):
    """The base of strategies that cache keys and values of the texts, for one batch of rows at a
    time."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """The most cache entries that a round writes after the newest verified slot."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[LayerInput]:
        """The draft's layers in the dtype of decoding."""

    @abstractmethod
    def read_prompts(self, prompts: Sequence[Sequence[int]], aux_BTD: Tensor) -> None:
        """Cache the prompts' slots, except the last, whose token the first round provides."""

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @cached_property
    def head_WE(self) -> Tensor:  # noqa: N802  (its shape)
        return self.draft.lm_head.weight.to(self.dtype)

    @cached_property
    def cache(self) -> Tensor:
        """[layers, keys and values, B, U, G, C]"""
        return self._empty(0, 0)

    def start(self, prompts: Sequence[Sequence[int]], aux_BTD: Tensor) -> None:
        self.clear(len(prompts))
        self.read_prompts(prompts, aux_BTD)

    def reserve(self, end: int) -> int:
        return self.room(end + self.slots)

    def clear(self, batch: int) -> None:
        """Clear the cache for `batch` rows; it grows as needed."""
        rows, places = self.cache.shape[2:4]
        if batch > rows:
            self.cache = self._empty(batch, places)
            self.passes.drop_recordings()
        else:
            self.cache.zero_()

    def _empty(self, rows: int, places: int) -> Tensor:
        """An empty cache for all layers: zeros, not garbage, since a masked NaN is still a NaN."""
        config = self.draft.config
        heads, channels = config.num_key_value_heads, config.head_dim
        shape = (len(self.layers), 2, rows, places, heads, channels)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def room(self, needed: int) -> int:
        """Make room for `needed` entries per row, and return how many a pass should read."""
        used = self.passes.room(needed)
        old = self.cache
        rows, places = old.shape[2:4]
        if used > places:
            self.cache = self._empty(rows, max(used, 2 * places))
            self.cache[:, :, :, :places] = old
            self.passes.drop_recordings()
        return used

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, moved to the front."""
        index = torch.tensor(rows, device=self.device, dtype=torch.long)
        cache = self.cache
        cache[:, :, : len(rows)] = cache.index_select(2, index)

    def store(
        self, layer: int, index_BQ: Tensor, keys_NGC: Tensor, values_NGC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values; returns all of these rows', [B, U, G, C] each."""
        rows_B1 = torch.arange(len(index_BQ), device=self.device)[:, None]
        keys_BUGC, values_BUGC = self.cache[layer, :, : len(index_BQ)]
        keys_BUGC[rows_B1, index_BQ] = keys_NGC.reshape(*index_BQ.shape, *keys_NGC.shape[1:])
        values_BUGC[rows_B1, index_BQ] = values_NGC.reshape(*index_BQ.shape, *values_NGC.shape[1:])
        return keys_BUGC, values_BUGC


class UnrolledStrategy(CachedStrategy):
    """The base of strategies whose draft carries a state from depth to depth."""

    draft: UnrolledDraftModel

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        return isinstance(draft, UnrolledDraftModel)

    @property
    def count(self) -> int:
        return self.shape.num_draft_tokens

    @cached_property
    def layers(self) -> Sequence[LayerInput]:
        return self.draft.unrolled_layers(self.dtype)

    @cached_property
    def _norm(self) -> Tensor | None:
        return self.draft.norm_weight(self.dtype)

    def read_prompts(self, prompts: Sequence[Sequence[int]], aux_BTD: Tensor) -> None:
        width = max(len(prompt) for prompt in prompts) - 1
        if width > 0:
            tokens = [[*prompt[1:], *[0] * (width + 1 - len(prompt))] for prompt in prompts]
            token_BQ = torch.tensor(tokens, device=self.device)
            index_BQ = torch.arange(width, device=self.device).expand(token_BQ.shape)
            state_BQE = self.draft.project_hidden_states(aux_BTD[:, :width], self.dtype)
            self.room(width)
            self.run(state_BQE, token_BQ, index_BQ, used=width)

    def extend(self, state: RoundState) -> Tensor:
        """Run verified slots with the target's true features; returns [B, E] at the anchors."""
        state_BQE = self.draft.project_hidden_states(state.aux_BQD, self.dtype)
        place_Q = torch.arange(state.token_BQ.shape[1], device=self.device)
        index_BQ = state.start_B[:, None] + place_Q
        state_BQE = self.run(state_BQE, state.token_BQ, index_BQ, used=state.used)
        rows_B = torch.arange(len(state_BQE), device=self.device)
        return state_BQE[rows_B, state.count_B - 1]

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
        """Run new entries through all layers; returns the states for the next depth ([B, Q, E]).

        `used` is the number of cache entries to read: at least one past the highest index, and
        covered by `room`. Without `position_BQ` and `visible_BQU` an entry sits at its index and
        attends to every index up to it.
        """
        shape = token_BQ.shape
        if position_BQ is None:
            position_BQ = index_BQ
        if visible_BQU is None:
            visible_BQU = torch.arange(used, device=self.device) <= index_BQ[..., None]
        angles = self.draft.rotary(position_BQ.flatten(), self.dtype)
        embedding = self.draft.embed_at(token_BQ.flatten(), position_BQ.flatten(), self.dtype)
        token = self.layers[0].token_part(embedding)
        state = state_BQE.flatten(0, 1)
        for number, layer in enumerate(self.layers):

            def attend_all(q: Tensor, keys: Tensor, values: Tensor, number: int = number) -> Tensor:
                stored = self.store(number, index_BQ, keys, values)
                q_BQHC = q.view(*shape, *q.shape[1:])
                return attend(q_BQHC, *stored, visible_BQU).flatten(0, 1)

            state = layer.through(state, token, angles, attend_all)
            token = None
        if self.draft.spec.norm_output:
            state = self._normed(state)
        return state.view(*shape, -1)

    def logits(self, carried: Tensor) -> Tensor:
        """[..., E] as `run` returns it -> [..., W]."""
        normed = carried if self.draft.spec.norm_output else self._normed(carried)
        return F.linear(normed, self.head_WE)

    def _normed(self, state: Tensor) -> Tensor:
        return rms_norm(state, self._norm, self.draft.spec.rms_norm_eps)


def attend(q_BQHC: Tensor, keys_BUGC: Tensor, values_BUGC: Tensor, visible_BQU: Tensor) -> Tensor:
    """[B, Q, H, C]; of the cached keys and values, only those that the mask covers are read."""
    used, group = visible_BQU.shape[-1], q_BQHC.shape[2] // keys_BUGC.shape[2]

    def by_head(x_BUGC: Tensor) -> Tensor:
        # repeated here: memory-efficient kernels that take a mask do not support grouped heads
        return x_BUGC[:, :used].repeat_interleave(group, dim=2).transpose(1, 2)

    out_BHQC = F.scaled_dot_product_attention(
        q_BQHC.transpose(1, 2),
        by_head(keys_BUGC),
        by_head(values_BUGC),
        attn_mask=visible_BQU[:, None],
    )
    return out_BHQC.transpose(1, 2)
