"""Run the target once over many rows and store its answers: the work behind `precompute`.

Batches never cross a shard, so its bytes do not depend on which process wrote it, or when: any
number of processes may work on one cache, each on the shards that it has claimed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fledge.core.claims import Claims
from fledge.core.distributed import World, join_world, leave_world
from fledge.core.errors import BadInput
from fledge.core.files import removed
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.automodel import write_embedding
from fledge.target.cache.capture import Disk, Written, capture
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
from fledge.target.finite import module_of

STOPPED = 3  # exit code: by the quota, or a full disk


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
            if target.joins:
                written = write_fixed_share(job, plan, target, world, on_progress=on_progress)
            else:
                written = write_shards(job, plan, target, claims, on_progress=on_progress, say=say)
    leave_world(world)
    return how_it_ended(job, plan, written, say)


def how_it_ended(job: CacheJob, plan: CachePlan, written: int, say: Callable[[str], None]) -> Done:
    """All that was allowed has been written; was it all?"""
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
        claims.remove_temporary_files()
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
    indices = [index for index in plan.missing if index < plan.allowed]
    missing = {job.shard_path(index).name: index for index in indices}
    is_written = _New([job.shard_path(index) for index in indices])
    disk, told = Disk(job, on_progress, module_of(target)), 0

    def waiting(shards: int) -> None:
        nonlocal told
        disk.check()
        if shards != told:
            say(f"waiting for {shards} shard{'s'[: shards > 1]} that other processes are writing")
        told = shards

    with disk:
        names = claims.share(missing, is_written, waiting=waiting)
        written = capture(job, target, disk, (missing[name] for name in names))
    if not (job.directory / MANIFEST).exists():  # nor is what was written before
        raise removed(job.directory)
    return written


def write_fixed_share(
    job: CacheJob,
    plan: CachePlan,
    target: Eagle3TargetBackend,
    world: World,
    *,
    on_progress: Callable[[Written], None] = lambda _: None,
) -> int:
    """The same for ranks that share a target and so must ask it equally often: each writes a share
    that is settled beforehand. A shard that others write meanwhile is written twice, alike."""
    plan = world.from_main(plan)
    with Disk(job, on_progress, module_of(target)) as disk:
        written = capture(job, target, disk, _share(plan, world.rank, world.size))
    for _ in range(_behind(job, plan, world)):
        target.join()
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


def _share(plan: CachePlan, rank: int, world: int) -> list[int]:
    """The missing shards that one process of so many writes."""
    return [index for index in plan.missing if index < plan.allowed][rank::world]


def _behind(job: CacheJob, plan: CachePlan, world: World) -> int:
    """How many questions less than the busiest process this one has."""
    sizes = [
        min(len(job.rows), (index + 1) * job.shard_size) - index * job.shard_size
        for index in range(len(plan.shard_bytes))
    ]
    asks = [
        sum(-(-sizes[index] // job.batch_size) for index in _share(plan, rank, world.size))
        for rank in range(world.size)
    ]
    return max(asks) - asks[world.rank]
