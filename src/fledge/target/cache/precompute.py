"""Run the target once over many rows and keep what it says: the work behind `precompute`.

The target computes on the caller's thread; copying to the host, checksums and writing happen on
another, a few batches behind. Rows go to shards in order, and batches never cross a shard, so a
shard's bytes do not depend on which process wrote it, or when.
"""

import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import removed
from fledge.core.rows import TokenRow
from fledge.data.pack import Piece, collate
from fledge.data.vocab import DraftVocabulary
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.codec import encode_rows
from fledge.target.cache.format import CacheShape, ShardLayout, shard_name
from fledge.target.cache.manifest import (
    LATE,
    MANIFEST,
    VOCABULARY,
    ensure_free,
    ensure_resumable,
    existing_shards,
    has_head,
    remove_leftovers,
    target_facts,
    target_tensors,
    write_head,
)
from fledge.target.cache.shard import ShardWriter, is_whole_shard, layout_of, open_shard

_AHEAD = 3  # batches that the target may be ahead of the disk


@dataclass(frozen=True)
class CacheJob:
    """What to compute and where it goes; nothing is loaded or written yet."""

    directory: Path
    rows: Sequence[TokenRow]  # in the order of the cache
    shape: CacheShape
    manifest: dict[str, Any]  # all fields but the target's own
    vocabulary: DraftVocabulary | None = None
    model_dir: Path | None = None  # whose config and tokenizer are copied into the cache
    shard_size: int = 256
    batch_size: int = 4
    pad_id: int = 0
    resume: bool = False
    quota_bytes: int | None = None

    def shard_rows(self, index: int) -> list[TokenRow]:
        stop = min(len(self.rows), (index + 1) * self.shard_size)
        return [self.rows[i] for i in range(index * self.shard_size, stop)]


@dataclass(frozen=True)
class CachePlan:
    """The cost of a job, to the byte, before it starts."""

    shard_bytes: tuple[int, ...]
    head_bytes: int  # embedding, head: an estimate until the target is loaded
    done: frozenset[int]  # shards that are there already
    allowed: int  # the first so many shards fit the quota
    rows: int
    tokens: int

    @property
    def total_bytes(self) -> int:
        return sum(self.shard_bytes) + self.head_bytes

    @property
    def missing(self) -> list[int]:
        return [i for i in range(len(self.shard_bytes)) if i not in self.done]

    @property
    def to_write_bytes(self) -> int:
        return sum(self.shard_bytes[i] for i in self.missing)


@dataclass(frozen=True)
class Progress:
    rows: int  # written by this process
    bytes: int


@dataclass(frozen=True)
class Outcome:
    written: int  # shards
    complete: bool  # every shard is on the disk


def plan_cache(job: CacheJob, *, head_bytes: int) -> CachePlan:
    """Refuse what cannot work and add up the bytes. Touches nothing."""
    if not len(job.rows):
        raise BadInput("no row to precompute", where=str(job.directory))
    ensure_free(job.directory, resume=job.resume)
    existing = existing_shards(job.directory)
    ensure_resumable(job.directory, job.manifest, existing)
    sizes, done, tokens = [], set(), 0
    for index in range(-(-len(job.rows) // job.shard_size)):
        layout = layout_of(job.shape, job.shard_rows(index))
        sizes.append(layout.n_bytes)
        tokens += int(layout.row_start[-1])
        if index in existing and is_whole_shard(job.directory / shard_name(index), layout):
            done.add(index)
    extra = existing - set(range(len(sizes)))
    if extra:
        raise BadInput(
            f"{shard_name(min(extra))} is beyond the {len(sizes)} shards of these rows",
            where=str(job.directory),
        )
    used, allowed = head_bytes, len(sizes)
    for index, size in enumerate(sizes):
        used += size
        if job.quota_bytes is not None and used > job.quota_bytes:
            allowed = index
            break
    return CachePlan(tuple(sizes), head_bytes, frozenset(done), allowed, len(job.rows), tokens)


def check_disk(job: CacheJob, plan: CachePlan) -> int:
    """Free bytes where the cache will lie; too few are refused before anything is written."""
    place = job.directory
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    allowed = [i for i in plan.missing if i < plan.allowed]
    needed = sum(plan.shard_bytes[i] for i in allowed)
    if needed + plan.head_bytes > free:
        raise BadInput(
            f"{(needed + plan.head_bytes) / 1e9:.2f} GB would be written, {free / 1e9:.2f} GB are "
            "free",
            where=str(job.directory),
            fix="use a smaller encoding, fewer rows or another disk",
        )
    return free


def begin_cache(job: CacheJob, target: Eagle3TargetBackend, *, write: bool = True) -> None:
    """Check the loaded target against the cache that is there, then write all but the shards."""
    info = target.info()
    tensors = target_tensors(info, target.get_input_embeddings().weight)
    manifest = {**job.manifest, LATE: target_facts(info, tensors)}
    existing = existing_shards(job.directory)
    ensure_resumable(job.directory, manifest, existing)
    if not write:
        return
    job.directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(job.directory)
    if not existing or not has_head(job.directory, job.model_dir):
        if job.vocabulary is not None and not job.shape.is_hidden:
            job.vocabulary.save(job.directory / VOCABULARY)
        write_head(job.directory, manifest, tensors, job.model_dir)


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


def run_job(
    job: CacheJob,
    plan: CachePlan,
    target: Eagle3TargetBackend,
    *,
    rank: int = 0,
    world: int = 1,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Write this process's share of the missing shards; `begin_cache` has been called."""
    vocabulary = None
    if job.vocabulary is not None and not job.shape.is_hidden:
        ids = torch.from_numpy(job.vocabulary.selected_token_ids)
        vocabulary = ids, torch.from_numpy(job.vocabulary.t2d)
        target.set_vocab_mapping(*vocabulary)
    shards = [index for index in plan.missing if index < plan.allowed][rank::world]
    with _Disk(job, on_progress) as disk:
        for index in shards:
            if not (job.directory / MANIFEST).exists():
                raise removed(job.directory)
            rows = job.shard_rows(index)
            disk.begin(index, rows)
            for members in _batches(rows, job.batch_size):
                disk.put(members, _compute(job, target, [rows[i] for i in members], vocabulary))
            disk.end()
    return Outcome(len(shards), not [i for i in plan.missing if i >= plan.allowed])


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
    packs = [(Piece(i, 0, n),) for i, n in enumerate(lengths)]
    batch = target.answer(collate(rows, packs, max(lengths), job.pad_id))
    slots = [torch.from_numpy(job.shape.slots(np.asarray(row.loss_mask))) for row in rows]
    device = batch.aux_hidden_states.device
    mapping = None if vocabulary is None else (vocabulary[0].to(device), vocabulary[1].to(device))
    # the head is asked for only where probabilities have to be made of states
    head = target.info().head if batch.supervision == "hidden" and mapping is not None else None
    tensors = encode_rows(batch, job.shape, lengths, slots, head=head, vocabulary=mapping)
    tokens = {field.name for field in job.shape.token_fields()}
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

    def __init__(self, job: CacheJob, on_progress: Callable[[Progress], None]) -> None:
        self._job, self._on_progress = job, on_progress
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

    def begin(self, index: int, rows: list[TokenRow]) -> None:
        self._offer((index, rows))
        self._raise()

    def put(self, members: list[int], payload: _Payload) -> None:
        self._offer((members, payload))
        self._raise()

    def end(self) -> None:
        self._offer(None)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _offer(self, item: Any) -> None:
        while self._error is None:
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _take(self) -> Any:
        item = self._queue.get()
        if isinstance(item, _Stopped):
            raise item
        return item

    def _work(self) -> None:
        try:
            while (begin := self._take()) is not None:
                index, rows = begin
                layout = layout_of(self._job.shape, rows)
                with open_shard(self._job.directory / shard_name(index), layout, rows) as shard:
                    while (item := self._take()) is not None:
                        self._put(shard, layout, *item)
        except BaseException as error:  # noqa: BLE001  (raised where the next batch is offered)
            self._error = error

    def _put(
        self, shard: ShardWriter, layout: ShardLayout, members: list[int], payload: _Payload
    ) -> None:
        for row, document in zip(members, payload.documents(), strict=True):
            shard.put(row, document)
            self._bytes += sum(tensor.nbytes for tensor in document.values())
        self._rows += len(members)
        self._on_progress(Progress(self._rows, self._bytes))
