"""Capture a model's inner states during one forward pass, leaving nothing behind.

Hooks live exactly as long as the `with` block, even when the forward raises. States are copied
immediately into the tensor that is returned, so no other activations are kept alive.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from fledge.target.packing import Group


def hidden_of(output: Any) -> Tensor:
    """The hidden states in a decoder layer's output: the output itself if it is a tensor, else a
    named field, else its first tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):  # a transformers ModelOutput is one
        named = dict(output)
    elif is_dataclass(output):
        named = {field.name: getattr(output, field.name) for field in fields(output)}
    else:
        named = {}
    unnamed = list(output) if isinstance(output, tuple | list) else list(named.values())
    for value in (named.get("hidden_states"), named.get("last_hidden_state"), *unnamed):
        if isinstance(value, Tensor):
            return value
    raise ValueError(f"a decoder layer returned no tensor, but {type(output).__name__}")


@contextmanager
def layer_outputs(
    layers: Sequence[nn.Module], layer_ids: Sequence[int], on_output: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While open, call `on_output(layer id, hidden states)` whenever one of the layers returns."""

    def hook(layer_id: int, _module: nn.Module, _args: Any, output: Any) -> None:
        on_output(layer_id, hidden_of(output))

    with ExitStack() as stack:
        for layer_id in layer_ids:
            stack.enter_context(layers[layer_id].register_forward_hook(partial(hook, layer_id)))
        yield


@contextmanager
def muted_head(head: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, replace the output head's forward with `answer`, which gets the head's input.

    The model's own forward still runs from start to end, so what `answer` receives is by definition
    the head's input: after the final norm and any scaling that an architecture applies before its
    head. The head's hooks are disabled too: those of sharding would fetch weights for nothing and
    would mistake the output of `answer` for one shard.
    """
    wrapped = head.__dict__.get("forward")  # offloading tools store their own forward here
    hooks = head._forward_pre_hooks, head._forward_hooks
    head._forward_pre_hooks, head._forward_hooks = OrderedDict(), OrderedDict()
    head.forward = answer
    try:
        yield
    finally:
        head._forward_pre_hooks, head._forward_hooks = hooks
        if wrapped is None:
            del head.forward
        else:
            head.forward = wrapped


class _PassStopped(BaseException):
    """Unwinds a forward pass whose remaining layers are not needed. A BaseException, so that the
    model's own `except Exception` does not catch it."""


@contextmanager
def stop_behind(
    layer_id: int, write: Callable[[int, Tensor], None], answer: Callable[[Tensor], Tensor]
) -> Iterator[Callable[[int, Tensor], None]]:
    """Yield a `write` that ends the enclosed pass once this layer's states are written; `answer` is
    called with zeros in place of the last hidden state."""

    def write_and_stop(number: int, states: Tensor) -> None:
        write(number, states)
        if number == layer_id:
            answer(states.new_zeros(()).expand_as(states))
            raise _PassStopped

    try:
        yield write_and_stop
    except _PassStopped as stopped:
        # its traceback holds the model's frames and would keep their tensors alive until the next
        # garbage collection
        clear_frames(stopped.__traceback__)


class AuxBuffer:
    """The aux states [B, T, A * D] of one batch, filled layer by layer during the forward.

    Layers are concatenated in the order of `layer_ids`. Memory is allocated at the first write,
    when width, dtype and device are known. Slots that are never written (padding) stay 0.
    """

    def __init__(self, rows_BT: torch.Size, layer_ids: Sequence[int]) -> None:
        self.rows_BT = rows_BT
        self.layer_ids = list(layer_ids)
        self.aux_BTD: Tensor | None = None
        self.captured: dict[int, Tensor] = {}  # layer id -> its slice of aux_BTD

    def write(self, layer_id: int, states: Tensor, group: Group | None) -> None:
        """Copy one layer's states into place: those of the batch, or of a group's documents."""
        width = states.shape[-1]
        if self.aux_BTD is None:
            self.aux_BTD = states.new_zeros((*self.rows_BT, width * len(self.layer_ids)))
        begin = self.layer_ids.index(layer_id) * width
        self.captured[layer_id] = self.aux_BTD[..., begin : begin + width]
        if group is None:
            self.captured[layer_id].copy_(states)
        else:
            group.put(states, self.captured[layer_id])

    def result(self) -> Tensor:
        assert self.aux_BTD is not None, "no layer has been captured"
        return self.aux_BTD
