"""The target as an engine runs it: a Hugging Face model with a cache that can take back tokens.

Rows of different lengths stand right-aligned in the cache (left padding, the layout every causal
LM of transformers knows from batched generation) and without holes: after each round the tokens
that were not accepted are cut out and the rows are moved together again. With one row that is a
crop. Distances in the cache equal distances in the text, so sliding windows stay right.

Shapes: B rows, N new tokens of a row, U cache width, D target hidden, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from fledge.errors import BadInput
from fledge.target.capture import layer_outputs
from fledge.target.layers import find_layers, text_config

_ATTENTION = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Answer:
    """What the target made of some new tokens."""

    logits_BNV: Tensor
    aux_BND: Tensor | None  # three aux states side by side; None without a draft


class CachedTarget:
    """A causal LM and its cache, for one batch of rows at a time."""

    def __init__(self, model: nn.Module, aux_layer_ids: Sequence[int] | None) -> None:
        self.model = model.eval()
        self.aux_layer_ids = list(aux_layer_ids or [])
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        weight = next(embedding.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.lengths: list[int] = []  # tokens of each row in the cache
        self._check_config()
        self._layers = find_layers(model)
        self._cache = DynamicCache()
        self._width = 0
        takes = inspect.signature(model.forward).parameters
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def begin(self, prompts: Sequence[Sequence[int]]) -> Answer:
        """Read the prompts; logits [B, 1, V] of the next token, aux states left-aligned."""
        self.lengths = [len(prompt) for prompt in prompts]
        self._cache, self._width = DynamicCache(), 0  # full layers whatever the model's windows
        width = max(self.lengths)
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        pad_B1 = self._column([width - length for length in self.lengths])
        place_BU = torch.arange(width, device=self.device) - pad_B1
        mask_BU = None if min(self.lengths) == width else place_BU >= 0
        answer = self._forward(
            torch.tensor(padded, device=self.device),
            None if mask_BU is None else mask_BU.long(),
            place_BU.clamp_min(0),
            **self._keep_last,
        )
        self._width = width
        aux_BND = answer.aux_BND
        if aux_BND is not None and mask_BU is not None:
            source_BU = (torch.arange(width, device=self.device) + pad_B1).clamp_max(width - 1)
            aux_BND = take(aux_BND, source_BU)
        return Answer(answer.logits_BNV[:, -1:], aux_BND)

    def step(
        self,
        token_BN: Tensor,
        *,
        depth_BN: Tensor | None = None,
        visible_BNN: Tensor | None = None,
    ) -> Answer:
        """Read N new tokens behind each row: one after another, or as the tree says.

        `depth_BN` is how far behind the row's end a token stands, `visible_BNN` which of the new
        tokens it sees, itself included. The tokens stay in the cache until `keep` is called.
        """
        count = token_BN.shape[1]
        length_B1 = self._column(self.lengths)
        pad_B1 = self._width - length_B1
        past_BU = torch.arange(self._width, device=self.device) >= pad_B1
        mask: Tensor | None
        if visible_BNN is not None:
            past_BNU = past_BU[:, None].expand(-1, count, -1)
            mask = self._additive(torch.cat([past_BNU, visible_BNN], dim=2)[:, None])
        elif min(self.lengths) == self._width:
            mask = None
        else:
            mask = F.pad(past_BU, (0, count), value=True).long()
        if depth_BN is None:
            depth_BN = torch.arange(count, device=self.device)[None]
        return self._forward(token_BN, mask, length_B1 + depth_BN)

    def keep(self, rows: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Go on with these rows, each with these of its last step's tokens (ascending)."""
        if not rows:
            return
        lengths = [self.lengths[row] for row in rows]
        total = [length + len(own) for length, own in zip(lengths, kept, strict=True)]
        every_row = list(rows) == list(range(len(self.lengths)))
        chain = all(list(own) == list(range(len(own))) for own in kept)
        if every_row and chain and len({len(own) for own in kept}) == 1:
            self._rearrange(None, None, self._width + len(kept[0]))
        else:
            rows_B = torch.tensor(rows, device=self.device)
            self._rearrange(rows_B, self._source(lengths, kept), max(total))
        self.lengths = total

    def _source(self, lengths: list[int], kept: Sequence[Sequence[int]]) -> Tensor:
        """[B, new width]: where in the cache each entry comes from; padding may be anything."""
        total = [length + len(own) for length, own in zip(lengths, kept, strict=True)]
        most = max(1, *(len(own) for own in kept))
        new_BK = torch.tensor([[*own, *[0] * (most - len(own))] for own in kept])
        length_B1 = self._column(lengths)
        place_BU = torch.arange(max(total), device=self.device) - (max(total) - self._column(total))
        behind_BU = (place_BU - length_B1).clamp(0, most - 1)
        new_BU = self._width + new_BK.to(self.device).gather(1, behind_BU)
        old_BU = (place_BU + self._width - length_B1).clamp(0)
        return torch.where(place_BU < length_B1, old_BU, new_BU)

    def _rearrange(self, rows_B: Tensor | None, source_BU: Tensor | None, width: int) -> None:
        for layer in self._cache.layers:
            for name in ("keys", "values"):
                held = getattr(layer, name)
                if source_BU is None:
                    held = held[:, :, :width]
                else:
                    index = source_BU[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3])
                    held = held[rows_B].gather(2, index)
                setattr(layer, name, held)
        self._width = width

    def _forward(
        self, token_BN: Tensor, mask: Tensor | None, position_BN: Tensor, **options: Any
    ) -> Answer:
        seen: dict[int, Tensor] = {}
        with layer_outputs(self._layers, self.aux_layer_ids, seen.__setitem__):
            output = self.model(
                input_ids=token_BN,
                attention_mask=mask,
                position_ids=position_BN.expand(token_BN.shape),
                past_key_values=self._cache,
                use_cache=True,
                **options,
            )
        aux = torch.cat([seen[i] for i in self.aux_layer_ids], -1) if self.aux_layer_ids else None
        return Answer(output.logits, aux)

    def _check_config(self) -> None:
        """Only keys and values of plain attention can be taken back token by token."""
        config = text_config(self.model.config)
        kinds = set(getattr(config, "layer_types", None) or []) - {*_ATTENTION}
        if kinds:
            raise BadInput(
                f"{type(self.model).__name__} has {', '.join(sorted(kinds))} layers, whose state "
                "cannot take back tokens",
                fix="speculative decoding needs a target with plain attention",
            )

    def check_trees(self) -> None:
        """A tree needs a mask of its own, which windows and flash kernels do not take."""
        config = text_config(self.model.config)
        kind = getattr(config, "_attn_implementation", "eager")
        windows = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
        if kind not in ("eager", "sdpa") or windows or getattr(config, "sliding_window", None):
            raise BadInput(
                f"tree drafting needs full attention under sdpa or eager; this target has "
                f"{', '.join(sorted(windows)) or kind}",
                fix="use chain or parallel drafting",
            )

    def _additive(self, visible: Tensor) -> Tensor:
        """0 where visible, the least number elsewhere: the form a model takes as it is."""
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self.device)
        return mask.masked_fill_(~visible, torch.finfo(self._dtype).min)

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)[:, None]


def take(values_BND: Tensor, index_BK: Tensor) -> Tensor:
    """[B, K, D]: entries of each row by index."""
    return values_BND.gather(1, index_BK[..., None].expand(-1, -1, values_BND.shape[-1]))
