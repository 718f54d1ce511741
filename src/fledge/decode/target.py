"""The target as an engine runs it: a Hugging Face model with a cache that can take back tokens.

`begin` reads prompts. `read` is one pass over a few new tokens of every row, written as plain
tensor code, so that it can be recorded (`recorded`): the lengths of the rows are a tensor, and the
mask, sliding windows and trees included, is made from them.

Shapes: N new tokens of a row.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput
from fledge.decode.cache import SlotCache
from fledge.decode.recorded import Passes
from fledge.target.capture import layer_outputs
from fledge.target.hf.one_row import lent_attention
from fledge.target.hf.probe import find_head_module
from fledge.target.layers import find_layers, inner_layers, text_config

_ATTENTION = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class PassOutput:
    """What the target made of some new tokens."""

    logits_BNV: Tensor
    aux_BND: Tensor  # the aux layers' states side by side: [B, N, 0] where there are none


@dataclass(frozen=True)
class Layout:
    """New tokens that do not stand one after another: where each stands, and what it sees."""

    depth_BN: Tensor  # how far behind the row's end
    visible_BNN: Tensor  # which of the new tokens, itself included


class CachedTarget:
    """A causal LM and its cache, for one batch of rows at a time."""

    def __init__(
        self, model: nn.Module, aux_layer_ids: Sequence[int] | None, passes: Passes | None = None
    ) -> None:
        self.model = model.eval()
        self.aux_layer_ids = list(aux_layer_ids or [])
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        weight = next(embedding.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.passes = passes or Passes(self.device, record=False)
        self._kinds = self._layer_kinds()
        self._layers, self._head = find_layers(model), find_head_module(model)
        self._attention = self._masked_attention()
        self._cache = SlotCache(len(self._layers))

    def begin(self, prompts: Sequence[Sequence[int]], *, ahead: int = 0) -> PassOutput:
        """Read the prompts; logits [B, 1, V] of the next token, aux states left-aligned.

        `ahead` is how many tokens the first `read` will put behind them.
        """
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        if self._cache.start(len(prompts), self.passes.room(width + ahead)):
            self.passes.drop_recordings()
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        token_BN = torch.tensor(padded, device=self.device)
        position_BN = torch.arange(width, device=self.device).expand(token_BN.shape)
        last_B1 = torch.tensor(lengths, device=self.device)[:, None] - 1
        self._cache.aim(None, used=width, count=width)
        # padding stands behind the text, where a causal model does not look
        with _only(self._head, last_B1):
            return self._forward(token_BN, None, position_BN)

    def room(self, needed: int) -> int:
        """Make room for `needed` places of a row; how many a pass should look at."""
        used = self.passes.room(needed)
        if self._cache.reserve(used):
            self.passes.drop_recordings()
        return used

    def read(
        self,
        token_BN: Tensor,
        length_B: Tensor,
        *,
        used: int,
        layout: Layout | None = None,
        level: bool = False,
    ) -> PassOutput:
        """Read N new tokens behind each row: one after another, or as `layout` says.

        `level`: every row ends where `used` ends, so that the model's own mask is right for a
        chain, and attention may run without any.
        """
        step_BN = torch.arange(token_BN.shape[1], device=self.device).expand(token_BN.shape)
        length_B1 = length_B[:, None]
        position_BN = length_B1 + (step_BN if layout is None else layout.depth_BN)
        mask = index_BN = None
        if layout is not None or not level:
            visible_BNN = None if layout is None else layout.visible_BNN
            mask = self._mask(length_B1, position_BN, visible_BNN, used)
        if not level:
            index_BN = length_B1 + step_BN
        self._cache.aim(index_BN, used=used, count=token_BN.shape[1])
        return self._forward(token_BN, mask, position_BN)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, moved to the front."""
        self._cache.select(list(rows))

    def settle(self, start_B: Tensor, place_BQ: Tensor) -> None:
        """Move the entries at `place_BQ` behind `start_B` together: the accepted path of a tree."""
        start_B1 = start_B[:, None]
        into_BQ = start_B1 + torch.arange(place_BQ.shape[1], device=self.device)
        self._cache.move(start_B1 + place_BQ, into_BQ)

    def _mask(
        self, length_B1: Tensor, position_BN: Tensor, visible_BNN: Tensor | None, used: int
    ) -> Tensor | dict[str, Tensor]:
        """[B, 1, N, U] for every kind of layer: 0 where visible, the least number elsewhere."""
        count = position_BN.shape[1]
        place_U = torch.arange(used, device=self.device)
        new_BU = place_U - length_B1  # 0: the first new token
        stands_BU = place_U.expand_as(new_BU)
        if visible_BNN is None:
            visible_BNU = stands_BU[:, None] <= position_BN[..., None]
        else:
            node_BU = new_BU.clamp(0, count - 1)
            seen_BNU = visible_BNN.gather(2, node_BU[:, None].expand(-1, count, -1))
            visible_BNU = (new_BU < 0)[:, None] | (seen_BNU & (new_BU < count)[:, None])
            stands_BU = torch.where(new_BU < 0, stands_BU, position_BN.gather(1, node_BU))
        masks = {}
        for kind, window in self._kinds.items():
            shown_BNU = visible_BNU
            if window is not None:
                shown_BNU = visible_BNU & (stands_BU[:, None] > position_BN[..., None] - window)
            mask_BNU = torch.zeros(shown_BNU.shape, dtype=self.dtype, device=self.device)
            mask_BNU.masked_fill_(~shown_BNU, torch.finfo(self.dtype).min)
            masks[kind] = mask_BNU[:, None]
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _forward(
        self, token_BN: Tensor, mask: Tensor | dict[str, Tensor] | None, position_BN: Tensor
    ) -> PassOutput:
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(self._watched(seen))
            if mask is not None and self._attention is not None:
                stack.enter_context(lent_attention(self.model, self._attention))
            output = self.model(
                input_ids=token_BN,
                attention_mask=mask,
                position_ids=position_BN,
                past_key_values=self._cache,
                use_cache=True,
            )
        if not self.aux_layer_ids:
            return PassOutput(output.logits, output.logits.new_empty((*token_BN.shape, 0)))
        aux_BND = torch.cat([seen[i] for i in self.aux_layer_ids], -1)
        return PassOutput(output.logits, aux_BND)

    @contextmanager
    def _watched(self, seen: dict[int, Tensor]) -> Iterator[None]:
        """While open, the aux layers' states are put into `seen`."""
        depth = len(self._layers)

        def keep_last(_module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[depth] = args[0]

        with ExitStack() as stack:
            inner = inner_layers(self.aux_layer_ids, depth)
            stack.enter_context(layer_outputs(self._layers, inner, seen.__setitem__))
            if depth in self.aux_layer_ids:  # first of all: another hook cuts the head's input
                stack.enter_context(self._head.register_forward_pre_hook(keep_last, prepend=True))
            yield

    def _layer_kinds(self) -> dict[str, int | None]:
        """The kinds of attention in the model and how far each looks back (None: all the way).

        Only keys and values of plain attention can be taken back token by token.
        """
        config = text_config(self.model.config)
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or [])
        if other := kinds - {*_ATTENTION}:
            raise BadInput(
                f"{type(self.model).__name__} has {', '.join(sorted(other))} layers, whose state "
                "cannot take back tokens",
                fix="speculative decoding needs a target with plain attention",
            )
        if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
            raise BadInput(
                f"{type(self.model).__name__} encodes positions as biases, which need its own mask",
                fix="speculative decoding needs a target with rotary or learned positions",
            )
        if not kinds:
            kinds = {"full_attention" if window is None else "sliding_attention"}
        return {kind: window if kind == "sliding_attention" else None for kind in kinds}

    def _masked_attention(self) -> str | None:
        """What to run instead of attention that takes no mask of ours; None: it takes one."""
        config = text_config(self.model.config)
        if getattr(config, "_attn_implementation", "eager") in ("eager", "sdpa"):
            return None
        return "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"


@contextmanager
def _only(head: nn.Module, place_B1: Tensor) -> Iterator[None]:
    """While open, the head makes logits of one place of each row alone."""

    def pick(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (take(args[0], place_B1), *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def take(values_BND: Tensor, index_BQ: Tensor) -> Tensor:
    """[B, Q, D]: entries of each row by index."""
    return values_BND.gather(1, index_BQ[..., None].expand(-1, -1, values_BND.shape[-1]))
