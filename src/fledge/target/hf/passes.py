"""Compiled layers of a model in this process, and checks that two ways of running it are equal."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fledge.core.errors import first_line
from fledge.target.hf.one_row import (
    Unsupported,
    whole_row,
)
from fledge.target.inprocess import InProcessTarget
from fledge.target.layers import AuxBuffer
from fledge.target.packing import Documents, Group

if TYPE_CHECKING:
    from fledge.target.hf.model import HFEagle3TargetModel


log = logging.getLogger(__name__)
StatesOf = Callable[[int, Tensor], None]  # (layer id, its output)


class CompiledLayers:
    """Compiled forwards of some layers, installed only while a pass runs. (Small models are limited
    by kernel launches instead: see `core/graphs.py`.)"""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._forwards: list[tuple[nn.Module, Any]] = [
            (layer, torch.compile(layer.forward))
            for layer in layers
            if "forward" not in layer.__dict__  # offloading tools store their own forward there
        ]
        self._needs_collection = bool(self._forwards)

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


# --- numerical checks that two ways of running a model give the same states, whatever its class ---

Way = Callable[[Tensor, AuxBuffer], None]  # runs ids [B, T] and fills the buffer
# Raised by architectures that cannot run one of the ways (TypeError: a forward that accepts no
# further arguments).
_REFUSALS = (Unsupported, TypeError, ValueError, RuntimeError, LookupError, AttributeError)


def fill_alike(one: Way, other: Way, aux_layer_ids: Sequence[int], device: torch.device) -> bool:
    """Whether both ways run twelve tokens and give the same aux states up to rounding."""
    ids_BT = torch.arange(12, device=device)[None]
    answers = []
    try:
        for way in (one, other):
            aux = AuxBuffer(ids_BT.shape, aux_layer_ids)
            way(ids_BT, aux)
            answers.append(aux.result().double())
    except _REFUSALS:
        return False
    error = (answers[0] - answers[1]).abs().mean() / answers[0].abs().mean()
    return bool(error < (1e-4 if aux.result().dtype in (torch.float32, torch.float64) else 3e-2))


def one_row_is_exact(target: "HFEagle3TargetModel") -> bool:
    """Whether two small documents give the same states in one row as they do alone."""
    documents = Documents((0, 7), (7, 5))

    def as_rows(ids_BT: Tensor, aux: AuxBuffer) -> None:
        for group in InProcessTarget._groups(target, documents, ids_BT):
            _fill(target, group, ids_BT, aux)

    def in_one_row(ids_BT: Tensor, aux: AuxBuffer) -> None:
        group = whole_row(documents, ids_BT.numel(), device=ids_BT.device)
        _fill(target, group, ids_BT, aux)

    return fill_alike(as_rows, in_one_row, target.aux_layer_ids, target._device())


def sharing_is_exact(target: "HFEagle3TargetModel") -> bool:
    """Whether a small row gives the same states shared by ranks as on one rank."""

    def shared(ids_BT: Tensor, aux: AuxBuffer) -> None:
        answer = target._run_slots(ids_BT, None, partial(aux.write, group=None))
        target._keep_last(answer, aux, None)

    alone = partial(_fill, target, None)
    return fill_alike(alone, shared, target.aux_layer_ids, target._device())


@torch.no_grad()
def stopping_is_exact(target: "HFEagle3TargetModel") -> bool:
    """Whether a pass that ends after the last aux layer gives the states of a whole pass, and
    leaves the model unchanged."""
    whole = partial(_fill, target, None)

    def stopped(ids_BT: Tensor, aux: AuxBuffer) -> None:
        with target.stopping():
            whole(ids_BT, aux)

    return fill_alike(stopped, whole, target.aux_layer_ids, target._device())


def _fill(
    target: "HFEagle3TargetModel", group: Group | None, ids_BT: Tensor, aux: AuxBuffer
) -> None:
    ids_NL = ids_BT if group is None else group.take(ids_BT)
    answer = target._run(ids_NL, None, group, partial(aux.write, group=group))
    target._keep_last(answer, aux, group)
