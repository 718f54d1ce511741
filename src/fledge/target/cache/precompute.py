"""Run the target once over many rows and store its answers: the work behind `precompute`.

The target computes on the caller's thread; copies, checksums and writing follow on another. Batches
never cross a shard, so its bytes do not depend on which process wrote it, or when: any number of
processes may work on one cache, each on the shards that it has claimed.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fledge.core.claims import Claims
from fledge.core.distributed import join_world, leave_world
from fledge.core.errors import BadInput
from fledge.core.files import removed
from fledge.core.rows import TokenRow
from fledge.data.pack import collate, one_per_row
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.automodel import write_embedding
from fledge.target.cache.codec import encode_rows, unsound
from fledge.target.cache.job import (
    CacheJob,
    CachePlan,
    check_disk,
    describe_plan,
    plan_cache,
    readable,
)
from fledge.target.cache.manifest import (
    CLAIMS,
    LATE,
    MANIFEST,
    VOCABULARY,
    ensure_resumable,
    existing_shards,
    has_head,
    remove_temporary_files,
    target_facts,
    target_tensors,
    write_head,
)
from fledge.target.cache.padded import PaddedLayout, PaddedWriter, open_padded
from fledge.target.cache.shard import ShardWriter, open_shard
from fledge.target.cache.store import row_fault
from fledge.target.finite import module_of, refusal

STOPPED = 3  # exit code: by the quota, or a full disk
_BAD_TOKENS, _BAD_SLOTS = "bad tokens", "bad slots"  # beside the fields of the cache
_AHEAD = 3  # batches that the target may be ahead of the disk


@dataclass(frozen=True)
class Written:
    rows: int  # written by this process
    bytes: int


@dataclass(frozen=True)
class Done:
    """How a precompute ended."""

    code: int  # exit code
    predicted_bytes: int
    reused_shards: int
    written_shards: int  # by this process

    @property
    def complete(self) -> bool:
        """Whether every shard is on the disk."""
        return self.code == 0


def execute(
    job: CacheJob,
    head_bytes: int,
    load: Callable[[], Eagle3TargetBackend],
    *,
    device: torch.device,
    say: Callable[[str], None],
    on_progress: Callable[[Written], None] = lambda _: None,
) -> Done:
    """Check, predict, load the target, write: the whole of a precompute, in every process."""
    plan = plan_cache(job, head_bytes=head_bytes)
    free = check_disk(job, plan)
    # everybody has looked at the directory before anybody writes: joining waits for all
    world = join_world(device)
    if world.is_main:
        for line in describe_plan(job, plan, free):
            say(line)
    with load() as target:
        check_target(job, target)
        with Claims(job.directory / CLAIMS) as claims:
            begin_cache(job, target, claims)
            written = write_shards(job, plan, target, claims, on_progress=on_progress, say=say)
    leave_world(world)
    complete = all(index < plan.allowed for index in plan.missing)
    if not complete:
        say(f"stopped by the quota of {readable(job.quota_bytes or 0)}; --resume continues")
    return Done(0 if complete else STOPPED, plan.total_bytes, len(plan.done), written)


def begin_cache(job: CacheJob, target: Eagle3TargetBackend, claims: Claims) -> None:
    """Check the loaded target against the cache that is there, then write all but the shards, one
    process after the other: the first has everything to do."""
    info = target.info()
    tensors = target_tensors(info, target.get_input_embeddings().weight)
    manifest = {**job.manifest, LATE: target_facts(info, tensors)}
    with claims.alone("manifest"):
        existing = existing_shards(job.directory)
        ensure_resumable(job.directory, manifest, existing, shared=claims.has_company())
        remove_temporary_files(job.directory, claims)
        if not existing or not has_head(job.directory, job.model_dir):
            if job.vocabulary is not None:
                job.vocabulary.save(job.directory / VOCABULARY)
            if job.padded_to is not None:
                write_embedding(job.directory, tensors["embed_tokens"])
            write_head(job.directory, job.on_disk(manifest), tensors, job.model_dir)


def check_target(job: CacheJob, target: Eagle3TargetBackend) -> None:
    """Refuse a loaded target that is not what the job was laid out for."""
    info = target.info()
    for name, ours, theirs in (
        ("hidden_size", job.shape.hidden_size, info.hidden_size),
        ("vocab_size", job.manifest["vocab_size"], info.vocab_size),
        ("aux_layer_ids", list(job.manifest["aux_layer_ids"]), list(target.aux_layer_ids)),
    ):
        if ours != theirs:
            raise BadInput(f"the loaded target has {name} {theirs}, its config says {ours}")
    if job.shape.is_hidden and target.supervision != "hidden":
        raise BadInput(
            f"the {job.shape.encoding} encoding keeps hidden states, the target answers with "
            f"{target.supervision}",
            fix="target.supervision=hidden",
        )


def write_shards(
    job: CacheJob,
    plan: CachePlan,
    target: Eagle3TargetBackend,
    claims: Claims,
    *,
    on_progress: Callable[[Written], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Write missing shards until none is left that nobody has claimed, and wait for those; returns
    how many this process wrote. `begin_cache` has been called."""
    vocabulary = None
    if job.vocabulary is not None and not job.shape.is_hidden:
        ids = torch.from_numpy(job.vocabulary.selected_token_ids)
        vocabulary = ids, torch.from_numpy(job.vocabulary.t2d)
        target.set_vocab_mapping(*vocabulary)
    indices = [index for index in plan.missing if index < plan.allowed]
    missing = {job.shard_path(index).name: index for index in indices}
    is_written, written = _New([job.shard_path(index) for index in indices]), 0
    disk, told = _Disk(job, on_progress, module_of(target)), 0

    def waiting(shards: int) -> None:
        nonlocal told
        disk.check()
        if shards != told:
            say(f"waiting for {shards} shard{'s'[: shards > 1]} that other processes are writing")
        told = shards

    with disk:
        for name in claims.share(missing, is_written, waiting=waiting):
            if not (job.directory / MANIFEST).exists():
                raise removed(job.directory)
            rows = job.shard_rows(missing[name])
            disk.take((missing[name], rows))
            for members in _batches(rows, job.batch_size):
                asked = [rows[i] for i in members]
                disk.take((members, _compute(job, target, asked, vocabulary)))
            disk.take(None)
            written += 1
    if not (job.directory / MANIFEST).exists():  # nor is what was written before
        raise removed(job.directory)
    return written


class _New:
    """Whether a file is there, and not the damaged one that was there at the beginning."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = {path.name: path for path in paths}
        self._before = {path.name: _stamp(path) for path in paths}

    def __call__(self, name: str) -> bool:
        stamp = _stamp(self._paths[name])
        return stamp is not None and stamp != self._before[name]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _batches(rows: Sequence[TokenRow], size: int) -> Iterator[list[int]]:
    """Rows of like length together: the target then computes little padding."""
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
    # the head is asked for only where probabilities have to be made of states
    head = target.info().head if batch.supervision == "hidden" and mapping is not None else None
    tensors = encode_rows(batch, job.shape, lengths, slots, head=head, vocabulary=mapping)
    tokens = {_BAD_TOKENS, *(field.name for field in job.shape.token_fields())}
    # judged as it is kept, where it lies: the thread that writes reads the verdict
    tensors[_BAD_TOKENS], tensors[_BAD_SLOTS] = unsound(tensors, job.shape)
    sizes = {name: lengths if name in tokens else [len(s) for s in slots] for name in tensors}
    return _Payload.copy_of(tensors, sizes)


@dataclass(frozen=True)
class _Payload:
    """A batch's tensors on their way to the host, and how many rows of each a document has."""

    tensors: dict[str, Tensor]
    sizes: dict[str, list[int]]
    copied: Any  # a CUDA event, or None

    @classmethod
    def copy_of(cls, tensors: dict[str, Tensor], sizes: dict[str, list[int]]) -> "_Payload":
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return cls(tensors, sizes, None)
        raw = {name: tensor.contiguous().view(torch.uint8) for name, tensor in tensors.items()}
        host = {
            name: torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for name, tensor in raw.items()
        }
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(host, sizes, copied)

    def documents(self) -> Iterator[dict[str, Tensor]]:
        if self.copied is not None:
            self.copied.synchronize()
        parts = {
            name: torch.split(tensor, self.sizes[name]) for name, tensor in self.tensors.items()
        }
        for document in range(len(next(iter(self.sizes.values())))):
            yield {name: split[document] for name, split in parts.items()}


class _Stopped(Exception):  # noqa: N818  (not an error: the caller gave up)
    """The caller left early; the open shard must not appear."""


class _Disk:
    """The writing thread: shards are begun, filled and ended in the order they are handed over."""

    def __init__(
        self, job: CacheJob, on_progress: Callable[[Written], None], model: nn.Module | None
    ) -> None:
        self._job, self._on_progress, self._model = job, on_progress, model
        self._queue: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._rows = self._bytes = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="fledge-cache")

    def __enter__(self) -> "_Disk":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._offer(None if kind is None else _Stopped())
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def take(self, item: tuple[int, list[TokenRow]] | tuple[list[int], _Payload] | None) -> None:
        """(index, rows) begins a shard, (members, payload) fills it, None ends it."""
        self._offer(item)
        self.check()

    def check(self) -> None:
        """Raise what has stopped the thread."""
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
        except BaseException as error:  # noqa: BLE001  (raised where the next batch is offered)
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
        """What is not finite does not get into a cache, not even as the precision it is kept in."""
        job = self._job
        slots = job.shape.slots(np.asarray(row.loss_mask))
        fault = row_fault(number, bad_NA, bad_M, slots, job.manifest["aux_layer_ids"])
        if fault is not None:
            where, dtype = str(job.directory), job.shape.dtype
            raise refusal(fault, dtype=dtype, place=row.place, model=self._model, where=where)
