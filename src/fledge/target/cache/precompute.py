"""Run the target once over many rows and store its answers: the work behind `precompute`.

Batches never span two shards, so a shard's bytes do not depend on which process wrote it, or when:
any number of processes may work on one cache, each on the shards that it has claimed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fledge.core.claims import Claims
from fledge.core.distributed import join_world, leave_world
from fledge.core.errors import BadInput
from fledge.core.files import atomic_file, removed
from fledge.core.progress import Progress, unwatched
from fledge.core.rows import TokenRow
from fledge.core.terminal import counted
from fledge.core.transfer import Fetched
from fledge.data.pack import collate, one_per_row
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.automodel import EMBEDDINGS
from fledge.target.cache.backend import row_fault
from fledge.target.cache.format import encode_rows, unsound
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
    target_facts,
    target_tensors,
    write_head,
)
from fledge.target.cache.shard import ShardWriter, open_shard
from fledge.target.finite_check import module_of, refusal

_BAD_TOKENS, _BAD_SLOTS = "bad tokens", "bad slots"  # in addition to the fields of the cache
_MAX_QUEUED = 3  # batches by which the target may be ahead of the disk


Vocabulary = tuple[Tensor, Tensor]  # draft tokens [W], and which of the target's [V] they are


def capture(
    job: CacheJob,
    target: Eagle3TargetBackend,
    shards: Iterable[int],
    progress: Progress,
) -> int:
    """Ask the target about these shards, one after another, and return how many there were."""
    vocabulary = None
    if job.vocabulary is not None and not job.shape.is_hidden:
        ids = torch.from_numpy(job.vocabulary.selected_token_ids)
        vocabulary = ids, torch.from_numpy(job.vocabulary.t2d)
        target.set_vocab_mapping(*vocabulary)
    rows = n_bytes = written = 0
    for index in shards:
        if not (job.directory / MANIFEST).exists():
            raise removed(job.directory)
        for batch_rows, batch_bytes in _fill(job, index, target, vocabulary):
            rows, n_bytes = rows + batch_rows, n_bytes + batch_bytes
            progress("writing", rows, len(job.rows), "rows", readable(n_bytes))
        written += 1
    return written


def _fill(
    job: CacheJob, index: int, target: Eagle3TargetBackend, vocabulary: Vocabulary | None
) -> Iterator[tuple[int, int]]:
    """Write one shard; yields (rows, bytes) of every batch that was written. One thread writes
    while the target answers about the next batches."""
    rows, model = job.shard_rows(index), module_of(target)
    # the thread ends first: it writes to the file that `open_shard` closes
    with (
        open_shard(job.shard_path(index), job.layout(rows), rows) as shard,
        ThreadPoolExecutor(1, "fledge-cache") as disk,
    ):
        writes = deque[Future[tuple[int, int]]]()
        for members in _batches(rows, job.options.batch_size):
            answer = _ask(job, target, [rows[i] for i in members], vocabulary)
            writes.append(disk.submit(_write, job, shard, index, members, answer, model))
            if len(writes) > _MAX_QUEUED:
                yield writes.popleft().result()
        for write in writes:
            yield write.result()


def _batches(rows: Sequence[TokenRow], size: int) -> Iterator[list[int]]:
    """Batches of rows of similar length, so that the target computes little padding."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].input_ids), i))
    for begin in range(0, len(order), size):
        yield order[begin : begin + size]


Answer = dict[str, tuple[Fetched, list[int]]]  # by name: what is stored, and how much of each row


def _ask(
    job: CacheJob,
    target: Eagle3TargetBackend,
    rows: list[TokenRow],
    vocabulary: Vocabulary | None,
) -> Answer:
    """The stored form of the target's answer about these rows, on its way to the host."""
    lengths = [len(row.input_ids) for row in rows]
    width = max(lengths)
    batch = target.answer(collate(rows, one_per_row(lengths, width), width, job.pad_id))
    slots = [torch.from_numpy(job.shape.slots(np.asarray(row.loss_mask))) for row in rows]
    device = batch.aux_hidden_states.device
    mapping = None if vocabulary is None else (vocabulary[0].to(device), vocabulary[1].to(device))
    # the head is needed only where probabilities must be computed from states
    head = target.info().head if batch.supervision == "hidden" and mapping is not None else None
    tensors = encode_rows(batch, job.shape, lengths, slots, head=head, vocabulary=mapping)
    by_token = {_BAD_TOKENS, *(field.name for field in job.shape.token_fields())}
    # checked in the stored precision, on the device; the writing thread reads the result
    tensors[_BAD_TOKENS], tensors[_BAD_SLOTS] = unsound(tensors, job.shape)
    counts = [len(slots_of_row) for slots_of_row in slots]
    return {n: (Fetched(t), lengths if n in by_token else counts) for n, t in tensors.items()}


def _write(
    job: CacheJob,
    shard: ShardWriter,
    index: int,
    members: list[int],
    answer: Answer,
    model: nn.Module | None,
) -> tuple[int, int]:
    """Write an answer about some of a shard's rows, unless it is not finite as it is stored;
    returns how many rows and bytes."""
    parts = {name: torch.split(tensor.read(), n) for name, (tensor, n) in answer.items()}
    bad_tokens, bad_slots = parts.pop(_BAD_TOKENS), parts.pop(_BAD_SLOTS)
    for place, row in enumerate(members):
        tokens, number = shard.rows[row], index * job.options.shard_size + row
        slots = job.shape.slots(np.asarray(tokens.loss_mask))
        layers = job.manifest["aux_layer_ids"]
        fault = row_fault(number, bad_tokens[place], bad_slots[place], slots, layers)
        if fault is not None:
            where, dtype = str(job.directory), job.shape.dtype
            raise refusal(fault, dtype=dtype, place=tokens.place, model=model, where=where)
        shard.put(row, {name: part[place] for name, part in parts.items()})
    return len(members), sum(part.nbytes for of_rows in parts.values() for part in of_rows)


STOPPED = 3  # exit code: stopped by the quota or a full disk


@dataclass(frozen=True)
class Done:
    """How a precompute ended."""

    code: int  # exit code
    predicted_bytes: int
    reused_shards: int
    written_shards: int  # by this process

    @property
    def complete(self) -> bool:
        """Whether every shard is on disk."""
        return self.code == 0


def execute(
    job: CacheJob,
    load: Callable[[], Eagle3TargetBackend],
    *,
    device: torch.device,
    progress: Progress = unwatched,
) -> Done:
    """A whole precompute, as run in every process: check, predict, load the target, write."""
    plan = plan_cache(job)
    free = check_disk(job, plan)
    # joining waits for all processes: each has checked the directory before any of them writes
    world = join_world(device)
    if world.is_main:
        for line in describe_plan(job, plan, free):
            progress.say(line)
    with load() as target:
        check_target(job, target)
        with Claims(job.directory / CLAIMS) as claims:
            begin_cache(job, target, claims)
            written = write_shards(job, plan, target, claims, progress)
    leave_world(world)
    return how_it_ended(job, plan, written, progress)


def how_it_ended(job: CacheJob, plan: CachePlan, written: int, progress: Progress) -> Done:
    """The outcome once all shards within the quota are written; reports a stop by the quota."""
    complete = plan.wanted == plan.missing
    if not complete:
        progress.say(
            f"stopped by the quota of {readable(job.options.quota_bytes or 0)}; --resume continues"
        )
    return Done(0 if complete else STOPPED, plan.total_bytes, len(plan.done), written)


def begin_cache(job: CacheJob, target: Eagle3TargetBackend, claims: Claims) -> None:
    """Check the loaded target against the existing cache, then write everything but the shards. One
    process at a time: the first one does the work."""
    info = target.info()
    tensors = target_tensors(info, target.get_input_embeddings().weight)
    manifest = {**job.manifest, LATE: target_facts(info, tensors)}
    with claims.alone("manifest"):
        existing = existing_shards(job.directory)
        ensure_resumable(job.directory, manifest, existing)
        claims.remove_temporary_files()
        if not existing or not has_head(job.directory, job.model_dir):
            if job.vocabulary is not None:
                job.vocabulary.save(job.directory / VOCABULARY)
            if job.padded_to is not None:
                with atomic_file(job.directory / EMBEDDINGS) as handle:
                    handle.write(save({"weight": tensors["embed_tokens"].float()}))
            write_head(job.directory, job.on_disk(manifest), tensors, job.model_dir)


def check_target(job: CacheJob, target: Eagle3TargetBackend) -> None:
    """Refuse a loaded target that differs from what the job was planned for."""
    info = target.info()
    for name, expected, actual in (
        ("hidden_size", job.shape.hidden_size, info.hidden_size),
        ("vocab_size", job.manifest["vocab_size"], info.vocab_size),
        ("aux_layer_ids", list(job.manifest["aux_layer_ids"]), list(target.aux_layer_ids)),
    ):
        if expected != actual:
            raise BadInput(f"the loaded target has {name} {actual}, its config says {expected}")
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
    missing = {job.shard_path(index).name: index for index in plan.wanted}
    last_reported = 0

    def waiting(shards: int) -> None:
        nonlocal last_reported
        if shards != last_reported:
            progress.say(f"waiting for {counted(shards, 'shard')} that other processes are writing")
        last_reported = shards

    names = claims.share(missing, lambda name: job.is_written(missing[name]), waiting=waiting)
    written = capture(job, target, (missing[name] for name in names), progress)
    if not (job.directory / MANIFEST).exists():  # the cache was removed meanwhile
        raise removed(job.directory)
    return written
