"""A compiled forward for a target's decoder layers, without changing the model.

Norms, rotary positions, activations and residuals are fused into a few kernels each. Small models
are limited by kernel launches instead: see `core/graphs.py`.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fledge.core.errors import first_line

log = logging.getLogger(__name__)


class CompiledLayers:
    """Compiled forwards of some layers, installed only while a pass runs."""

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
