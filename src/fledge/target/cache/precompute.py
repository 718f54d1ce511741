"""Run the target once over many rows and store its answers: the work behind `precompute`.

Batches never span two shards, so a shard's bytes do not depend on which process wrote it, or when:
any number of processes may work on one cache, each on the shards that it has claimed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich import filesize
from safetensors.torch import save
from torch import Tensor

from fledge.core.claims import Claims
from fledge.core.distributed import join_world, leave_world
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.progress import Progress, unwatched
from fledge.core.rows import TokenRow
from fledge.core.terminal import counted
from fledge.core.transfer import Fetched
from fledge.data.pack import collate, one_per_row
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.automodel import EMBEDDINGS
from fledge.target.cache.format import encode_rows, unsound
from fledge.target.cache.job import (
    CacheJob,
    CachePlan,
    announce,
    plan_cache,
)
from fledge.target.cache.manifest import (
    CLAIMS,
    LATE,
    MANIFEST,
    VOCABULARY,
    ensure_resumable,
    existing_shards,
    target_facts,
    target_tensors,
    write_head,
)
from fledge.target.cache.shard import ShardWriter, open_shard
from fledge.target.finite_check import Fault, refusal

_BAD_TOKENS, _BAD_SLOTS = "bad tokens", "bad slots"  # in addition to the fields of the cache
_MAX_QUEUED = 3  # batches by which the target may be ahead of the disk


Answer = dict[str, tuple[Fetched, list[int]]]  # by name: what is stored, and how much of each row


class _Capture:
    """Asks a target about the rows of a job and writes its answers."""

    def __init__(self, job: CacheJob, target: Eagle3TargetBackend) -> None:
        self.job, self.target = job, target
        self.vocabulary: tuple[Tensor, Tensor] | None = None  # of the draft: ids [W], mask [V]
        if job.vocabulary is not None and not job.shape.is_hidden:
            ids = torch.from_numpy(job.vocabulary.selected_token_ids)
            self.vocabulary = ids, torch.from_numpy(job.vocabulary.t2d)
            target.set_vocab_mapping(*self.vocabulary)

    def shard(self, index: int) -> Iterator[tuple[int, int]]:
        """Write one shard; yields (rows, bytes) of every batch that was written. One thread writes
        while the target answers about the next batches."""
        rows, size = self.job.shard_rows(index), self.job.options.batch_size
        # of similar length, so that the target computes little padding
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].input_ids), i))
        # the thread ends first: it writes to the file that `open_shard` closes
        with (
            open_shard(self.job.shard_path(index), self.job.layout(rows), rows) as shard,
            ThreadPoolExecutor(1, "fledge-cache") as disk,
        ):
            writes = deque[Future[tuple[int, int]]]()
            for begin in range(0, len(order), size):
                members = order[begin : begin + size]
                answer = self._ask([rows[i] for i in members])
                writes.append(disk.submit(self._write, shard, index, members, answer))
                if len(writes) > _MAX_QUEUED:
                    yield writes.popleft().result()
            for write in writes:
                yield write.result()

    def _ask(self, rows: list[TokenRow]) -> Answer:
        """The stored form of the target's answer about these rows, on its way to the host."""
        shape, lengths = self.job.shape, [len(row.input_ids) for row in rows]
        batch = self.target.answer(
            collate(rows, one_per_row(lengths, max(lengths)), max(lengths), self.job.pad_id)
        )
        slots = [torch.from_numpy(shape.slots(np.asarray(row.loss_mask))) for row in rows]
        device, head, mapping = batch.aux_hidden_states.device, None, None
        if self.vocabulary is not None:
            mapping = self.vocabulary[0].to(device), self.vocabulary[1].to(device)
            head = self.target.info().head if batch.supervision == "hidden" else None
        tensors = encode_rows(batch, shape, lengths, slots, head=head, vocabulary=mapping)
        by_token = {_BAD_TOKENS, *(field.name for field in shape.token_fields())}
        # checked in the stored precision, on the device; the writing thread reads the result
        tensors[_BAD_TOKENS], tensors[_BAD_SLOTS] = unsound(tensors, shape)
        counts = [len(slots_of_row) for slots_of_row in slots]
        return {n: (Fetched(t), lengths if n in by_token else counts) for n, t in tensors.items()}

    def _write(
        self, shard: ShardWriter, index: int, members: list[int], answer: Answer
    ) -> tuple[int, int]:
        """Write an answer about some of a shard's rows, unless it is not finite as it is stored;
        returns how many rows and bytes."""
        job, first = self.job, index * self.job.options.shard_size
        parts = {name: torch.split(tensor.read(), n) for name, (tensor, n) in answer.items()}
        bad_tokens, bad_slots = parts.pop(_BAD_TOKENS), parts.pop(_BAD_SLOTS)
        for place, row in enumerate(members):
            slots = job.shape.slots(np.asarray(shard.rows[row].loss_mask))
            bad = bad_tokens[place], bad_slots[place], slots
            fault = row_fault(first + row, *bad, job.manifest["aux_layer_ids"])
            if fault is not None:
                source, where = shard.rows[row].place, str(job.directory)
                raise refusal(fault, dtype=job.shape.dtype, place=source, where=where)
            shard.put(row, {name: part[place] for name, part in parts.items()})
        return len(members), sum(part.nbytes for of_rows in parts.values() for part in of_rows)


def row_fault(
    row: int,
    bad_NA: Tensor,
    bad_M: Tensor,
    slots: NDArray[np.int64],  # [M], where supervision is kept
    aux_layer_ids: Sequence[int],
) -> Fault | None:
    """The fault that `unsound` found in one row: its lowest bad layer, else supervision."""
    bad_A = [flags.nonzero() for flags in bad_NA.bool().T]
    for layer_id, where in sorted(zip(aux_layer_ids, bad_A, strict=True), key=lambda pair: pair[0]):
        if len(where):
            return Fault(f"layer {layer_id}", row, int(where[0]))
    if len(where := bad_M.bool().nonzero()):
        return Fault("supervision", row, int(slots[int(where[0])]) + 1)
    return None


STOPPED = 3  # exit code: stopped by the quota or a full disk; --resume continues


@dataclass(frozen=True)
class Done:
    """What a precompute found and wrote."""

    complete: bool  # else the quota stopped it
    shard_bytes: int
    reused_shards: int
    written_shards: int  # by this process


def execute(
    job: CacheJob,
    load: Callable[[], Eagle3TargetBackend],
    *,
    device: torch.device,
    progress: Progress = unwatched,
) -> Done:
    """A whole precompute, as run in every process: check, predict, load the target, write."""
    plan = plan_cache(job)
    summary = announce(job, plan)
    # joining waits for all processes: each has checked the directory before any of them writes
    world = join_world(device)
    if world.is_main:
        progress.say(summary)
    with load() as target:
        check_target(job, target)
        with Claims(job.directory / CLAIMS) as claims:
            begin_cache(job, target, claims)
            written = write_shards(job, plan, target, claims, progress)
    leave_world(world)
    return Done(plan.complete, sum(plan.shard_bytes), len(plan.done), written)


def begin_cache(job: CacheJob, target: Eagle3TargetBackend, claims: Claims) -> None:
    """Check the loaded target against the existing cache, then write everything but the shards. One
    process at a time: the first one does the work."""
    info = target.info()
    tensors = target_tensors(info, target.get_input_embeddings().weight)
    manifest = {**job.manifest, LATE: target_facts(info, tensors)}
    with claims.alone("manifest"):
        ensure_resumable(job.directory, manifest, existing_shards(job.directory))
        if not (job.directory / MANIFEST).exists():  # which is written last
            if job.vocabulary is not None:
                job.vocabulary.save(job.directory / VOCABULARY)
            if job.padded_to is not None:
                with atomic_file(job.directory / EMBEDDINGS) as handle:
                    handle.write(save({"weight": tensors["embed_tokens"].float()}))
            write_head(job.directory, job.on_disk(manifest), tensors, job.model_dir)


def check_target(job: CacheJob, target: Eagle3TargetBackend) -> None:
    """Refuse a loaded target that cannot give what the cache keeps."""
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
    progress: Progress = unwatched,
) -> int:
    """Write missing shards until all are claimed, then wait for those of other processes. Returns
    how many this process wrote. Call `begin_cache` first."""
    missing = {job.shard_path(index).name: index for index in plan.missing}

    def waiting(shards: int) -> None:
        progress(f"waiting for {counted(shards, 'shard')} that other processes are writing")

    capture, rows, n_bytes, written = _Capture(job, target), 0, 0, 0
    for name in claims.share(missing, lambda n: job.is_written(missing[n]), waiting=waiting):
        for batch_rows, batch_bytes in capture.shard(missing[name]):
            rows, n_bytes = rows + batch_rows, n_bytes + batch_bytes
            progress("writing", rows, len(job.rows), "rows", filesize.decimal(n_bytes))
        written += 1
    return written
