"""The draft as an engine runs it: keys and values kept by slot, a few new slots per call.

Slot t reads the target's aux states at token t and token t + 1, sits at position t and predicts
token t + 2 (FORMATS, slot semantics). The cache index of a slot *is* t. A rollout that starts at
anchor t leaves the keys of depth k at index t + k: what verification rejects is overwritten when
the true slots come, and "keys up to my own index" is the whole visibility rule of a chain and of
P-EAGLE's mask slots. A tree says itself who sees whom.

Shapes: B rows, Q new entries of a row, U cache entries, E draft hidden, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.draft.layer import LayerWeights, rms_norm
from fledge.draft.model import LlamaEagle3DraftModel
from fledge.draft.rotary import rotate


@dataclass(frozen=True)
class TrueSlots:
    """Slots that the target has verified since the draft last ran, left-aligned per row."""

    aux_BQD: Tensor  # aux states of the slots' own tokens
    token_BQ: Tensor  # the tokens they read, one further on
    start_B: list[int]  # index of each row's first new slot
    count_B: list[int]  # how many of the Q are real

    @property
    def anchors(self) -> list[int]:
        """Each row's last slot: where its rollout starts."""
        return [start + count - 1 for start, count in zip(self.start_B, self.count_B, strict=True)]


class Drafter:
    """A draft and its cache, for one batch of rows at a time."""

    def __init__(self, draft: LlamaEagle3DraftModel, *, dtype: torch.dtype | None = None) -> None:
        selected = draft.selected_token_ids
        if selected is None:
            raise ValueError("d2t: the draft has no vocabulary mapping")
        self.draft = draft.eval()
        self.dtype = dtype or draft.fc.weight.dtype
        self.device = draft.fc.weight.device
        self.selected_W = selected
        self.layers: list[LayerWeights] = [layer.weights(self.dtype) for layer in draft.layers]  # type: ignore[operator]
        self._norm = draft.norm.weight.to(self.dtype)
        self._head = draft.lm_head.weight.to(self.dtype)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def start(self, batch: int) -> None:
        """Empty caches for `batch` rows; they grow as they are written to."""
        config = self.draft.config
        shape = (batch, 0, config.num_key_value_heads, config.head_dim)
        empty_BUGC = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._keys = [empty_BUGC] * len(self.layers)
        self._values = [empty_BUGC] * len(self.layers)

    def _reserve(self, used: int) -> None:
        """Room for `used` entries of a row; zeros, not garbage: a masked NaN is still a NaN."""
        held = self._keys[0].shape[1]
        if used > held:
            more = (0, 0, 0, 0, 0, max(used - held, held, 256))
            self._keys = [F.pad(keys, more) for keys in self._keys]
            self._values = [F.pad(values, more) for values in self._values]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        if list(rows) != list(range(len(self._keys[0]))):
            index = torch.tensor(rows, device=self.device, dtype=torch.long)
            self._keys = [keys.index_select(0, index) for keys in self._keys]
            self._values = [values.index_select(0, index) for values in self._values]

    def extend(self, slots: TrueSlots) -> Tensor:
        """Run verified slots with the target's true features; [B, E] at each row's anchor."""
        state_BQE = self.draft.project_hidden_states(slots.aux_BQD, self.dtype)
        width = slots.token_BQ.shape[1]
        index_BQ, used = self.indices(slots.start_B, width), max(slots.start_B) + width
        state_BQE = self.run(state_BQE, slots.token_BQ, index_BQ, used=used)
        last_B = torch.tensor([count - 1 for count in slots.count_B], device=self.device)
        return state_BQE[torch.arange(len(last_B), device=self.device), last_B]

    def indices(self, start_B: Sequence[int], count: int) -> Tensor:
        """[B, count] consecutive cache indices from each row's start."""
        start = torch.tensor(start_B, device=self.device)[:, None]
        return start + torch.arange(count, device=self.device)

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

        `used` is one past the highest index, known to the caller without asking the device.
        Without `position_BQ` and `visible_BQU` an entry sits at its index and sees every index up
        to it.
        """
        batch, count = token_BQ.shape
        self._reserve(used)
        if position_BQ is None:
            position_BQ = index_BQ
        if visible_BQU is None:
            visible_BQU = torch.arange(used, device=self.device) <= index_BQ[..., None]
        embedding = F.embedding(token_BQ.flatten(), self.draft.embed_tokens.weight).to(self.dtype)
        token = self.layers[0].token_part(embedding)
        turn = self.draft.rotary(position_BQ.flatten(), self.dtype)
        rows_B1 = torch.arange(batch, device=self.device)[:, None]
        state = state_BQE.flatten(0, 1)
        for layer, keys_BUGC, values_BUGC in zip(
            self.layers, self._keys, self._values, strict=True
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
