"""Where a causal LM keeps its decoder layers, which of them a draft uses, and their states.

Works on plain modules (anything with a known attribute path), not on model classes, so that new
architectures need no entry here.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput, first_line, in_words
from fledge.target.packing import Group
from fledge.target.weights import whole_tensor

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EAGLE3_AUX_LAYERS = 3  # low, middle, high; other methods define their own number

# Checked in this order; the first path that holds a ModuleList or a ModuleDict is taken.
LAYER_PATHS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.layers",
    "layers",
    "transformer.h",
    "language_model.model.layers",  # conditional-generation wrappers before transformers 4.52
    "gpt_neox.layers",
    "model.decoder.layers",  # OPT
)
# The norm is a sibling of the layers, under one of these names.
NORM_NAMES = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")


@dataclass(frozen=True)
class FinalNorm:
    """The norm in front of the head. `last_hidden_states` are already normalized."""

    path: str
    kind: str  # class name of the module
    eps: float | None
    weight_D: Tensor | None


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order, from a ModuleList or a ModuleDict keyed by str(i)."""
    _, layers = _find(model)
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    names = [str(i) for i in range(len(layers))]
    if {*layers.keys()} != {*names}:
        what = f"decoder layers must be keyed '0' .. '{len(layers) - 1}', got "
        raise BadInput(f"{what}{sorted(layers.keys())}")
    return [layers[name] for name in names]


def describe_final_norm(model: nn.Module, *, bare: bool = False) -> FinalNorm | None:
    """The norm between the last layer and the head; None if the layers have no such sibling. A
    `bare` model was built without any layers."""
    path, _ = _find(model, bare=bare)
    parent_path = path.rpartition(".")[0]
    parent = model.get_submodule(parent_path)
    for name in NORM_NAMES:
        norm = getattr(parent, name, None)
        if isinstance(norm, nn.Module):
            eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
            weight = getattr(norm, "weight", None)
            return FinalNorm(
                path=f"{parent_path}.{name}" if parent_path else name,
                kind=type(norm).__name__,
                eps=None if eps is None else float(eps),
                weight_D=None if weight is None else whole_tensor(weight),
            )
    return None


def _find(model: nn.Module, *, bare: bool = False) -> tuple[str, nn.ModuleList | nn.ModuleDict]:
    for path in LAYER_PATHS:
        try:
            layers = model.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(layers, nn.ModuleList | nn.ModuleDict) and (bare or len(layers) > 0):
            return path, layers
    paths = ", ".join(LAYER_PATHS)
    what = f"no decoder layers in {type(model).__name__}: looked for a ModuleList or ModuleDict"
    raise BadInput(f"{what} under {paths}")


def text_config(config: "PretrainedConfig | None") -> Any:
    """The language model's part of a config: its `text_config` if that describes layers, else the
    config itself."""
    nested = getattr(config, "text_config", None)
    return nested if isinstance(getattr(nested, "num_hidden_layers", None), int) else config


def stated(config: "PretrainedConfig | None", name: str) -> int | None:
    """A size of the language model, or None if its config lacks it, as a runner's config may."""
    value = getattr(text_config(config), name, None)
    return value if isinstance(value, int) else None


def longest_text(config: "PretrainedConfig") -> int:
    """Longest row that a target accepts; practically unlimited if its config sets no limit."""
    return getattr(text_config(config), "max_position_embeddings", None) or 1 << 40


def target_depth(config: "PretrainedConfig", layers: Sequence[nn.Module] | None = None) -> int:
    """Number of decoder layers: from the config, else the number of modules."""
    depth = getattr(text_config(config), "num_hidden_layers", None)
    if depth is None and layers is not None:
        depth = len(layers)
    if not isinstance(depth, int) or depth < 1:
        raise BadInput(f"num_hidden_layers of the target's config must be positive, got {depth}")
    return depth


def default_aux_layer_ids(depth: int, count: int = EAGLE3_AUX_LAYERS) -> list[int]:
    """Low, middle, high: [1, n//2 - 1, n - 4]. 16 layers give [1, 7, 12], 32 give [1, 15, 28].
    A single one is the last hidden state, [n] (see `inner_layers`); any other number is spread
    evenly."""
    if count == 1:
        return [depth]
    if count != EAGLE3_AUX_LAYERS:
        return spread_layer_ids(depth, count)
    return _check_distinct([1, depth // 2 - 1, depth - 4], depth)


def spread_layer_ids(depth: int, count: int) -> list[int]:
    """The layers that block drafts use: evenly from the second layer to the third from the end,
    five of 36 are [1, 9, 17, 25, 33]. A single one is the middle layer."""
    if count == 1:
        return _check_distinct([depth // 2], depth)
    return _check_distinct([round(1 + i * (depth - 4) / (count - 1)) for i in range(count)], depth)


def _check_distinct(ids: list[int], depth: int) -> list[int]:
    count = len(ids)
    if len(set(ids)) < count or not all(0 <= i < depth for i in ids):
        raise BadInput(
            f"the target is too shallow for the default aux layers: {depth} layers give {ids}; "
            f"pass {in_words(count)} distinct aux_layer_ids"
        )
    return ids


def inner_layers(aux_layer_ids: Sequence[int], depth: int) -> list[int]:
    """The ids whose layer output is captured; the id `depth`, one past the last layer, stands for
    the last hidden state, after the final norm, as the head reads it."""
    return [i for i in aux_layer_ids if i < depth]


def validate_aux_layer_ids(
    aux_layer_ids: Sequence[int] | None, depth: int, count: int | None = EAGLE3_AUX_LAYERS
) -> list[int]:
    """Check for `count` distinct ids in range and return them in the order of concatenation;
    without ids, return the default ones. `count` None: any number, the last hidden state too."""
    if aux_layer_ids is None:
        return default_aux_layer_ids(depth, count or EAGLE3_AUX_LAYERS)
    number = "" if count is None else f"{in_words(count)} "
    try:
        given = list(aux_layer_ids)
        ids = [index(i) for i in given]  # accepts integers of numpy and torch too
    except TypeError:
        raise BadInput(f"aux_layer_ids must be {number}integers, got {aux_layer_ids!r}") from None
    alike = len(set(ids)) < len(ids) or any(isinstance(i, bool) for i in given)
    if not ids or alike or len(ids) != (count or len(ids)):
        raise BadInput(f"aux_layer_ids must be exactly {number}distinct layers, got {given}")
    # engines give a draft the last state only on its own
    last = depth if count is None or len(ids) == 1 else depth - 1
    if outside := [i for i in ids if not 0 <= i <= last]:
        what = f"aux_layer_ids {outside} out of range: the target has layers 0 .. {depth - 1}"
        raise BadInput(what)
    return ids


def hidden_of(output: Any) -> Tensor:
    """The hidden states in a decoder layer's output: a tensor, the first one of a sequence, or
    `hidden_states`. Gathered if ranks hold a part each."""
    if isinstance(output, Mapping):
        output = output["hidden_states"]
    elif isinstance(output, tuple | list):
        output = next(value for value in output if isinstance(value, Tensor))
    return whole_tensor(output if isinstance(output, Tensor) else output.hidden_states)


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

    The model's own forward runs from start to end, so the input is what the architecture really
    gives its head, any scaling included. The head's hooks are disabled: those of sharding would
    fetch weights for nothing and would mistake the output of `answer` for one shard.
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
        # its traceback holds the model's frames, and they the tensors, until garbage is collected
        clear_frames(stopped.__traceback__)


class AuxBuffer:
    """The aux states [B, T, A * D] of one batch, layers in the order of `layer_ids`, filled during
    the forward. Allocated at the first write; slots that are never written (padding) stay 0."""

    def __init__(self, rows_BT: torch.Size, layer_ids: Sequence[int]) -> None:
        self.rows_BT, self.layer_ids = rows_BT, list(layer_ids)
        self.aux_BTD: Tensor | None = None
        self.captured: dict[int, Tensor] = {}  # layer id -> its slice of aux_BTD

    def write(self, layer_id: int, states: Tensor, group: Group | None) -> None:
        """Copy one layer's states into place: those of the batch, or of a group's documents."""
        width = states.shape[-1]
        if self.aux_BTD is None:
            self.aux_BTD = states.new_zeros((*self.rows_BT, width * len(self.layer_ids)))
        begin = self.layer_ids.index(layer_id) * width
        into = self.captured[layer_id] = self.aux_BTD[..., begin : begin + width]
        if group is None:
            into.copy_(states)
        else:
            group.put(states, into)

    def result(self) -> Tensor:
        assert self.aux_BTD is not None, "no layer has been captured"
        return self.aux_BTD


# --- compiled layers ------------------------------------------------------------------------------


class CompiledLayers:
    """Compiled forwards of some layers, installed only while a pass runs. (Small models are limited
    by kernel launches instead: see `core/graphs.py`.)"""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._forwards: list[tuple[nn.Module, Any]] = [
            (layer, torch.compile(layer.forward)) for layer in layers
        ]
        self._needs_collection = bool(layers)

    @contextmanager
    def lent(self) -> Iterator[None]:
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.forward
        if self._needs_collection:  # compiling leaves reference cycles that hold this pass' tensors
            self._needs_collection = False
            gc.collect()

    def give_up(self, error: BaseException) -> None:
        reason = first_line(error)
        log.warning("the target's layers run uncompiled: compilation failed (%s)", reason)
        self._forwards = []


def compile_errors() -> tuple[type[BaseException], ...]:
    """The exceptions that torch raises when compilation fails."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError
