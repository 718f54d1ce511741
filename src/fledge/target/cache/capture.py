"""Computes the target's answers for whole shards, and writes them to disk on a thread.

The target runs on the caller's thread; copies, checksums and writes follow on the other one.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fledge.core.files import removed
from fledge.core.rows import TokenRow
from fledge.core.transfer import record_event
from fledge.data.pack import collate, one_per_row
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.codec import encode_rows, unsound
from fledge.target.cache.job import CacheJob
from fledge.target.cache.manifest import MANIFEST
from fledge.target.cache.padded import PaddedLayout, PaddedWriter, open_padded
from fledge.target.cache.shard import ShardWriter, open_shard
from fledge.target.cache.store import row_fault
from fledge.target.finite import refusal

_BAD_TOKENS, _BAD_SLOTS = "bad tokens", "bad slots"  # in addition to the fields of the cache
_MAX_QUEUED = 3  # batches by which the target may be ahead of the disk


@dataclass(frozen=True)
class Written:
    rows: int  # written by this process
    bytes: int


def capture(job: CacheJob, target: Eagle3TargetBackend, disk: "Disk", shards: Iterable[int]) -> int:
    """Ask the target about these shards, one after another, and return how many there were."""
    vocabulary = None
    if job.vocabulary is not None and not job.shape.is_hidden:
        ids = torch.from_numpy(job.vocabulary.selected_token_ids)
        vocabulary = ids, torch.from_numpy(job.vocabulary.t2d)
        target.set_vocab_mapping(*vocabulary)
    written = 0
    for index in shards:
        if not (job.directory / MANIFEST).exists():
            raise removed(job.directory)
        rows = job.shard_rows(index)
        disk.take((index, rows))
        for members in _batches(rows, job.batch_size):
            batch = [rows[i] for i in members]
            disk.take((members, _compute(job, target, batch, vocabulary)))
        disk.take(None)
        written += 1
    return written


def _batches(rows: Sequence[TokenRow], size: int) -> Iterator[list[int]]:
    """Batches of rows of similar length, so that the target computes little padding."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].input_ids), i))
    for begin in range(0, len(order), size):
        yield order[begin : begin + size]


def _compute(
    job: CacheJob,
    target: Eagle3TargetBackend,
    rows: list[TokenRow],
    vocabulary: tuple[Tensor, Tensor] | None,
) -> "_Payload":
    lengths = [len(row.input_ids) for row in rows]
    width = max(lengths)
    batch = target.answer(collate(rows, one_per_row(lengths, width), width, job.pad_id))
    slots = [torch.from_numpy(job.shape.slots(np.asarray(row.loss_mask))) for row in rows]
    device = batch.aux_hidden_states.device
    mapping = None if vocabulary is None else (vocabulary[0].to(device), vocabulary[1].to(device))
    # the head is needed only where probabilities must be computed from states
    head = target.info().head if batch.supervision == "hidden" and mapping is not None else None
    tensors = encode_rows(batch, job.shape, lengths, slots, head=head, vocabulary=mapping)
    token_fields = {_BAD_TOKENS, *(field.name for field in job.shape.token_fields())}
    # checked in the stored precision, on the device; the writing thread reads the result
    tensors[_BAD_TOKENS], tensors[_BAD_SLOTS] = unsound(tensors, job.shape)
    sizes = {name: lengths if name in token_fields else [len(s) for s in slots] for name in tensors}
    return _Payload.copy_of(tensors, sizes)


@dataclass(frozen=True)
class _Payload:
    """A batch's tensors, being copied to the host, and how many rows each document has in them."""

    tensors: dict[str, Tensor]
    sizes: dict[str, list[int]]
    copied: list[torch.cuda.Event]  # one per GPU

    @classmethod
    def copy_of(cls, tensors: dict[str, Tensor], sizes: dict[str, list[int]]) -> "_Payload":
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if not devices:
            return cls(tensors, sizes, [])
        raw = {name: tensor.contiguous().view(torch.uint8) for name, tensor in tensors.items()}
        host = {
            name: torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for name, tensor in raw.items()
        }
        return cls(host, sizes, [record_event(device) for device in devices])

    def documents(self) -> Iterator[dict[str, Tensor]]:
        for event in self.copied:
            event.synchronize()
        parts = {
            name: torch.split(tensor, self.sizes[name]) for name, tensor in self.tensors.items()
        }
        for document in range(len(next(iter(self.sizes.values())))):
            yield {name: split[document] for name, split in parts.items()}


class _Stopped(Exception):  # noqa: N818  (not an error: the caller gave up)
    """The caller exited early; the open shard must not appear."""


class Disk:
    """The writing thread. Shards are opened, filled and closed in the order they are passed in."""

    def __init__(
        self, job: CacheJob, on_progress: Callable[[Written], None], model: nn.Module | None
    ) -> None:
        self._job, self._on_progress, self._model = job, on_progress, model
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_QUEUED)
        self._error: BaseException | None = None
        self._rows = self._bytes = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="fledge-cache")

    def __enter__(self) -> "Disk":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._offer(None if kind is None else _Stopped())
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def take(self, item: tuple[int, list[TokenRow]] | tuple[list[int], _Payload] | None) -> None:
        """(index, rows) opens a shard, (members, payload) adds rows to it, None closes it."""
        self._offer(item)
        self.check()

    def check(self) -> None:
        """Raise the error that has stopped the thread, if any."""
        if self._error is not None:
            raise self._error

    def _offer(self, item: Any) -> None:
        while self._error is None:
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _next(self) -> Any:
        item = self._queue.get()
        if isinstance(item, _Stopped):
            raise item
        return item

    def _work(self) -> None:
        try:
            while (begin := self._next()) is not None:
                index, rows = begin
                with self._open(self._job.shard_path(index), rows) as shard:
                    while (item := self._next()) is not None:
                        self._put(shard, rows, index * self._job.shard_size, *item)
        except BaseException as error:  # noqa: BLE001  (raised when the next batch is offered)
            self._error = error

    def _open(
        self, path: Path, rows: list[TokenRow]
    ) -> AbstractContextManager[ShardWriter | PaddedWriter]:
        layout = self._job.layout(rows)
        if isinstance(layout, PaddedLayout):
            return open_padded(path, layout, rows)
        return open_shard(path, layout, rows)

    def _put(
        self,
        shard: ShardWriter | PaddedWriter,
        rows: list[TokenRow],
        first: int,  # the number of the shard's first row
        members: list[int],
        payload: _Payload,
    ) -> None:
        for row, document in zip(members, payload.documents(), strict=True):
            self._check(rows[row], first + row, document.pop(_BAD_TOKENS), document.pop(_BAD_SLOTS))
            shard.put(row, document)
            self._bytes += sum(tensor.nbytes for tensor in document.values())
        self._rows += len(members)
        self._on_progress(Written(self._rows, self._bytes))

    def _check(self, row: TokenRow, number: int, bad_NA: Tensor, bad_M: Tensor) -> None:
        """Refuse a row that is not finite in the precision in which it is stored."""
        job = self._job
        slots = job.shape.slots(np.asarray(row.loss_mask))
        fault = row_fault(number, bad_NA, bad_M, slots, job.manifest["aux_layer_ids"])
        if fault is not None:
            where, dtype = str(job.directory), job.shape.dtype
            raise refusal(fault, dtype=dtype, place=row.place, model=self._model, where=where)
