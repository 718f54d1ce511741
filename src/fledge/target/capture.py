"""Capture a model's inner states during one forward pass, leaving nothing behind.

Hooks live exactly as long as the `with` block, also when the forward raises; states are copied at
once into the tensor that will be returned, so nothing else of the model's memory is held.
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
    """The hidden states in a decoder layer's output: a tensor, a tuple's first, a named field."""
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
    """While open, `on_output(layer id, hidden states)` is called as each of them returns."""

    def hook(layer_id: int, _module: nn.Module, _args: Any, output: Any) -> None:
        on_output(layer_id, hidden_of(output))

    with ExitStack() as stack:
        for layer_id in layer_ids:
            stack.enter_context(layers[layer_id].register_forward_hook(partial(hook, layer_id)))
        yield


@contextmanager
def muted_head(head: nn.Module, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, the output head does no work: `answer` gets its input and stands in for it.

    The model's own forward still runs from root to end, and what arrives is by definition the
    head's input: after the final norm and after any scaling that an architecture does in front of
    its head. Hooks of the head rest too: those of sharding would fetch weights for nothing, and
    take the stand-in's answer for a part of one.
    """
    wrapped = head.__dict__.get("forward")  # offloading tools put their own forward here
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


class _AllHeard(BaseException):
    """No error, and nobody's to handle but ours: the rest of a pass is not needed."""


@contextmanager
def stop_behind(
    layer_id: int, write: Callable[[int, Tensor], None], answer: Callable[[Tensor], Tensor]
) -> Iterator[Callable[[int, Tensor], None]]:
    """Gives a `write` that ends the pass inside once this layer's states are written; `answer` gets
    zeros where the last hidden state would have been."""

    def write_and_stop(number: int, states: Tensor) -> None:
        write(number, states)
        if number == layer_id:
            answer(states.new_zeros(()).expand_as(states))
            raise _AllHeard

    try:
        yield write_and_stop
    except _AllHeard as heard:
        # it has passed through the model's own frames, and would keep their tensors alive until
        # Python looks for cycles
        clear_frames(heard.__traceback__)


class AuxBuffer:
    """The aux states [B, T, A * D] of one batch, filled layer by layer as the forward goes.

    Layers land side by side in the order of `layer_ids`; the memory is taken at the first write,
    when width, dtype and device are known. Slots that nothing is written to (padding) stay 0.
    """

    def __init__(self, rows_BT: torch.Size, layer_ids: Sequence[int]) -> None:
        self.rows_BT = rows_BT
        self.layer_ids = list(layer_ids)
        self.aux_BTD: Tensor | None = None
        self.captured: dict[int, Tensor] = {}  # layer id -> its part of aux_BTD

    def write(self, layer_id: int, states: Tensor, group: Group | None) -> None:
        """Copy one layer's states to their place: the batch's own rows, or a group's documents."""
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
