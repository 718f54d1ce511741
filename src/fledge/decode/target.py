"""The target as an engine runs it: a Hugging Face model and a cache that can roll back tokens.

The cache index of a token is its place in the text. A pass writes after each row's end, and the
next one overwrites what was rejected, so rolling back costs nothing. The lengths of the rows are a
tensor, from which the mask is computed, so that a pass can be recorded. Shapes: N new tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from fledge.core.errors import BadInput
from fledge.decode.packed import PackedLinears
from fledge.decode.recorded import Passes
from fledge.target.hf.embedding_and_head import find_head_module
from fledge.target.hf.one_row import lent_attention
from fledge.target.layers import find_layers, inner_layers, layer_outputs, text_config

# On a CPU attention rounds alike over so many queries or more, and over multiples of so many keys.
_EVEN_ROWS, _EVEN_KEYS = 4, 64
_ATTENTION = ("full_attention", "sliding_attention")


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `SlotCache`, with the interface that transformers expects."""

    is_sliding = False  # every token is kept; the mask implements windows

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, places = self._cache.rows, self._cache.places
        self.keys, self.values = (
            states.new_zeros((rows, states.shape[1], places, states.shape[3]))
            for states in (key_states, value_states)
        )  # zeros, not garbage: a masked NaN is still a NaN
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new states to their places; returns all keys and values that the pass reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, memory_BGUC: Tensor, states_BGNC: Tensor) -> Tensor:
        cache = self._cache
        used_BGUC = memory_BGUC[: len(states_BGNC), :, : cache.used]
        if cache.index_BN is None:
            used_BGUC[:, :, cache.before :] = states_BGNC
        else:  # layers may be on several devices
            index_BN = cache.index_BN.to(memory_BGUC.device)
            used_BGUC.scatter_(2, index_BN[:, None, :, None].expand(states_BGNC.shape), states_BGNC)
        return used_BGUC

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return self._cache.used, 0

    def get_seq_length(self) -> int:
        return self._cache.before

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of all layers of a target. Rows are left-aligned. The memory is not moved while it
    suffices (recorded passes rely on that); more places or rows need new memory."""

    def __init__(self, layers: int) -> None:
        self.rows = self.places = 0
        self.index_BN: Tensor | None = None  # where the next states go; None: from `before` on
        self.used = 0  # places that the next pass reads
        self.before = 0  # of these, before its new tokens; models derive their own mask from that
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def aim(self, index_BN: Tensor | None, *, used: int, count: int) -> None:
        """Set where the `count` new tokens of the next pass go, and how many places it reads."""
        self.index_BN, self.used, self.before = index_BN, used, used - count

    def start(self, rows: int, places: int) -> bool:
        """Clear the cache for `rows` rows; returns whether the memory has moved."""
        moved = rows > self.rows or places > self.places
        self.rows, self.places = max(rows, self.rows), max(places, self.places)
        for layer in self.layers:
            if moved:
                layer.is_initialized = False
                layer.keys = layer.values = None
        for memory in self._memories():
            memory.zero_()
        return moved

    def reserve(self, places: int) -> bool:
        """Make room for `places` places per row; returns whether the memory has moved."""
        old_places = self.places
        if places <= old_places:
            return False
        self.places = max(places, 2 * old_places)
        for layer in self.layers:
            if layer.is_initialized:
                old = layer.keys, layer.values
                layer.lazy_initialization(*old)
                for memory, kept in zip((layer.keys, layer.values), old, strict=True):
                    memory[:, :, :old_places] = kept
        return True

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, moved to the front."""
        for memory in self._memories():
            index = torch.tensor(rows, device=memory.device)
            memory[: len(rows)] = memory.index_select(0, index)

    def move(self, source_BN: Tensor, into_BN: Tensor) -> None:
        """Copy entries of each row to other places of the same row."""
        for memory in self._memories():
            rows, shape = memory[: len(source_BN)], (-1, memory.shape[1], -1, memory.shape[3])
            source, into = (
                index.to(memory.device)[:, None, :, None].expand(shape)
                for index in (source_BN, into_BN)
            )
            rows.scatter_(2, into, rows.gather(2, source))

    def _memories(self) -> Iterator[Tensor]:
        for layer in self.layers:
            if layer.is_initialized:
                yield from (layer.keys, layer.values)


@dataclass(frozen=True)
class PassOutput:
    """The target's output on some new tokens."""

    logits_BNV: Tensor
    aux_BND: Tensor  # the aux layers' states concatenated; [B, N, 0] without aux layers


@dataclass(frozen=True)
class Layout:
    """New tokens that do not form a sequence: where each stands, and what it attends to."""

    depth_BN: Tensor  # distance from the row's end
    visible_BNN: Tensor  # the new tokens that it attends to, itself included


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
        self._linears = PackedLinears(model)

    def begin(self, prompts: Sequence[Sequence[int]], *, ahead: int = 0) -> PassOutput:
        """Read the prompts; returns logits [B, 1, V] of the next token, aux states left-aligned.

        `ahead` is how many tokens the first `read` will append.
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

        def last_only(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (take(args[0], last_B1), *args[1:])

        handle = self._head.register_forward_pre_hook(last_only)
        try:  # padding comes after the text, where a causal model does not attend
            return self._forward(token_BN, None, position_BN)
        finally:
            handle.remove()

    def room(self, needed: int) -> int:
        """Make room for `needed` places per row, and return how many of them a pass should read."""
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
        """Read N new tokens after the end of each row, as a sequence or in the given `layout`.

        `level`: every row ends at `used`, so that the model's own causal mask is right for a chain,
        and attention may run without an explicit one.
        """
        count = token_BN.shape[1]
        if level and len(token_BN) == 1 and self._linears.any:
            # attention too then rounds alike: the output of a token is the same bits, however many
            # tokens a pass has. What is added comes after the text, and is not read
            added = max(0, _EVEN_ROWS - count)
            token_BN = torch.cat([token_BN, token_BN[:, -1:].expand(1, added)], 1)
            used, level = self.room(-(-(used + added) // _EVEN_KEYS) * _EVEN_KEYS), False
        step_BN = torch.arange(token_BN.shape[1], device=self.device).expand(token_BN.shape)
        length_B1 = length_B[:, None]
        position_BN = length_B1 + (step_BN if layout is None else layout.depth_BN)
        mask = None
        if layout is not None or not level:
            visible_BNN = None if layout is None else layout.visible_BNN
            mask = self._mask(length_B1, position_BN, visible_BNN, used)
        index_BN = None if level else length_B1 + step_BN
        self._cache.aim(index_BN, used=used, count=token_BN.shape[1])
        output = self._forward(token_BN, mask, position_BN)
        return PassOutput(output.logits_BNV[:, :count], output.aux_BND[:, :count])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, moved to the front."""
        self._cache.select(rows)

    def settle(self, start_B: Tensor, place_BQ: Tensor) -> None:
        """Move the entries at `start_B` + `place_BQ` together: the accepted path of a tree."""
        start_B1 = start_B[:, None]
        into_BQ = start_B1 + torch.arange(place_BQ.shape[1], device=self.device)
        self._cache.move(start_B1 + place_BQ, into_BQ)

    def _mask(
        self, length_B1: Tensor, position_BN: Tensor, visible_BNN: Tensor | None, used: int
    ) -> Tensor | dict[str, Tensor]:
        """[B, 1, N, U] for every kind of layer: 0 where visible, the lowest number elsewhere."""
        count = position_BN.shape[1]
        place_U = torch.arange(used, device=self.device)
        new_BU = place_U - length_B1  # 0: the first new token
        key_position_BU = place_U.expand_as(new_BU)
        if visible_BNN is None:
            visible_BNU = key_position_BU[:, None] <= position_BN[..., None]
        else:
            node_BU = new_BU.clamp(0, count - 1)
            seen_BNU = visible_BNN.gather(2, node_BU[:, None].expand(-1, count, -1))
            visible_BNU = (new_BU < 0)[:, None] | (seen_BNU & (new_BU < count)[:, None])
            key_position_BU = torch.where(
                new_BU < 0, key_position_BU, position_BN.gather(1, node_BU)
            )
        masks = {}
        for kind, window in self._kinds.items():
            in_window_BNU = visible_BNU
            if window is not None:
                in_window_BNU = visible_BNU & (
                    key_position_BU[:, None] > position_BN[..., None] - window
                )
            mask_BNU = torch.zeros(in_window_BNU.shape, dtype=self.dtype, device=self.device)
            mask_BNU.masked_fill_(~in_window_BNU, torch.finfo(self.dtype).min)
            masks[kind] = mask_BNU[:, None]
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _forward(
        self, token_BN: Tensor, mask: Tensor | dict[str, Tensor] | None, position_BN: Tensor
    ) -> PassOutput:
        states: dict[int, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(self._captured(states))
            stack.enter_context(self._linears.in_use())
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
        aux_BND = torch.cat([states[i] for i in self.aux_layer_ids], -1)
        return PassOutput(output.logits, aux_BND)

    @contextmanager
    def _captured(self, states: dict[int, Tensor]) -> Iterator[None]:
        """While open, the aux layers' states are stored in `states`."""
        depth = len(self._layers)

        def keep_last(_module: nn.Module, args: tuple[Any, ...]) -> None:
            states[depth] = args[0]

        with ExitStack() as stack:
            inner = inner_layers(self.aux_layer_ids, depth)
            stack.enter_context(layer_outputs(self._layers, inner, states.__setitem__))
            if depth in self.aux_layer_ids:  # must run first: another hook cuts the head's input
                stack.enter_context(self._head.register_forward_pre_hook(keep_last, prepend=True))
            yield

    def _layer_kinds(self) -> dict[str, int | None]:
        """The kinds of attention in the model and the window of each (None: unlimited).

        Only keys and values of plain attention can be rolled back token by token.
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
        """The implementation to use instead of one that takes no custom mask; None if it does."""
        config = text_config(self.model.config)
        if getattr(config, "_attn_implementation", "eager") in ("eager", "sdpa"):
            return None
        return "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"


def take(values_BND: Tensor, index_BQ: Tensor) -> Tensor:
    """[B, Q, D]: the entries of each row at the given indices."""
    return values_BND.gather(1, index_BQ[..., None].expand(-1, -1, values_BND.shape[-1]))
