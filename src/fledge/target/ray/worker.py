"""One target on a cluster: an ordinary target in a Ray actor's process.

A worker answers one question at a time, in the order in which Ray delivers them. It loads the
target at the first call rather than in its constructor: a missing model is then an error that the
caller gets, and not an actor that dies over and over.
"""

import hashlib
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.machine import find_device
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.manifest import target_facts, target_tensors
from fledge.target.kinds import LoadedTarget, kind_of

# --- arrays --------------------------------------------------------------------------------------
# Tensors in transit through Ray's object store: bytes that it neither copies nor pickles.
#
# Ray delivers numpy arrays as read-only views of shared memory; the receiver copies an answer once,
# into its own memory (page-locked if it goes to a GPU next).


@dataclass(frozen=True)
class Array:
    """A tensor of any dtype as bytes."""

    data: NDArray[Any]  # uint8, flat
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Array":
        tensor = tensor.detach().cpu().contiguous()
        return cls(tensor.flatten().view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self, *, pin_memory: bool = False) -> Tensor:
        """A copy that the caller owns."""
        copy = torch.empty(self.shape, dtype=self.dtype, pin_memory=pin_memory)
        copy.flatten().view(torch.uint8).numpy()[:] = self.data
        return copy


Arrays = dict[str, Array]


# --- worker ---------------------------------------------------------------------------------------


_REPORT_EVERY_S = 1.0
_MAX_KEPT = 8  # answers kept for ranks that may never ask for them, having asked another worker
_STATES = (
    *("aux_hidden_states", "logits", "last_hidden_states"),
    *("target_probs", "position_mask"),
)


@dataclass(frozen=True)
class Question:
    """Rows, and what else an answer about them depends on."""

    rows: tuple[Array | None, ...]  # the arguments of a `TokenBatch`
    vocabulary: Array | None  # the draft's token ids, for probabilities
    askers: int = 1  # ranks that ask about the same rows, which are captured once

    def key(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for part in (*self.rows, self.vocabulary):
            header = b"-" if part is None else f"{part.dtype} {part.shape}".encode()
            digest.update(header if part is None else header + part.data.tobytes())
        return digest.digest()


class TargetWorker:
    """The Ray actor that holds one target."""

    def __init__(
        self, name: str, section: LoadedTarget, *, aux_layers: int, gpus: float, board: Any
    ) -> None:
        self._name, self._section, self._board = name, section, board
        self._aux_layers, self._gpus = aux_layers, gpus
        self._target: Eagle3TargetBackend | None = None
        self._vocabulary: torch.Tensor | None = None
        self._kept: OrderedDict[bytes, tuple[Arrays, int]] = OrderedDict()
        self._figures = {"asked": 0, "captured": 0, "tokens": 0, "seconds": 0.0}
        self._started_at, self._reported_at = time.monotonic(), 0.0

    def hello(self) -> dict[str, Any]:
        """Load the target and return the facts about it."""
        target = self._open()
        info = target.info()
        self._report(now=True)
        return {
            **target_facts(info, {}),
            "hidden_size": info.hidden_size,
            "aux_layer_ids": list(target.aux_layer_ids),
            "supervision": target.supervision,
            "embeddings": len(target.get_input_embeddings().weight),
        }

    def tables(self) -> Arrays:
        """Embedding, head and norm; see `target_tensors`."""
        target = self._open()
        tensors = target_tensors(target.info(), target.get_input_embeddings().weight)
        return {name: Array.of(tensor) for name, tensor in tensors.items()}

    def answer(self, question: Question) -> Arrays:
        """The states of an `Eagle3TargetBatch` about these rows, shifted like the batch's."""
        target = self._open()
        self._figures["asked"] += 1
        key = question.key() if question.askers > 1 else b""
        if key in self._kept:
            answer, left = self._kept.pop(key)
        else:
            answer, left = self._capture(target, question), question.askers
        if left > 1:
            self._kept[key] = answer, left - 1
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._report()
        return answer

    def figures(self) -> dict[str, Any]:
        """Counters since the worker was started."""
        return dict(self._figures)

    def _open(self) -> Eagle3TargetBackend:
        if self._target is None:
            device = find_device("cuda" if self._gpus else "cpu")
            self._target = kind_of(self._section).open(
                self._section, device=device, aux_layers=self._aux_layers
            )
        return self._target

    def _capture(self, target: Eagle3TargetBackend, question: Question) -> Arrays:
        started_at = time.perf_counter()
        if question.vocabulary is not None:
            ids = question.vocabulary.tensor()
            if self._vocabulary is None or not torch.equal(ids, self._vocabulary):
                target.set_vocab_mapping(ids)
                self._vocabulary = ids
        tensors = [None if part is None else part.tensor() for part in question.rows]
        rows = TokenBatch(*tensors)  # type: ignore[arg-type]  # the first three are never None
        states = dict(target.answer(rows).tensors())
        answer = {name: Array.of(states[name]) for name in _STATES if name in states}
        self._figures["captured"] += 1
        self._figures["tokens"] += rows.tokens
        self._figures["seconds"] += time.perf_counter() - started_at
        return answer

    def _report(self, *, now: bool = False) -> None:
        """Send the counters to the board, at most once a second unless `now`, without waiting."""
        if self._board is None or (
            not now and time.monotonic() - self._reported_at < _REPORT_EVERY_S
        ):
            return
        self._reported_at = time.monotonic()
        import ray

        process: dict[str, Any] = {"node": ray.util.get_node_ip_address(), "pid": os.getpid()}
        process["up_s"] = time.monotonic() - self._started_at
        process["node_id"] = ray.get_runtime_context().get_node_id()
        self._board.tell.remote("targets", self._name, {**process, **self._figures})
