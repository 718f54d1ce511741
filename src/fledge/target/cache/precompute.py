"""Run the target once over many rows and store its answers: the work behind `precompute`.

Batches never span two shards, so a shard's bytes do not depend on which process wrote it, or when:
any number of processes may work on one cache, each on the shards that it has claimed.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    head_bytes: int,
    load: Callable[[], Eagle3TargetBackend],
    *,
    device: torch.device,
    say: Callable[[str], None],
    on_progress: Callable[[Written], None] = lambda _: None,
) -> Done:
    """A whole precompute, as run in every process: check, predict, load the target, write."""
    plan = plan_cache(job, head_bytes=head_bytes)
    free = check_disk(job, plan)
    # joining waits for all processes: each has checked the directory before any of them writes
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
    """The outcome once all shards within the quota are written; reports a stop by the quota."""
    complete = all(index < plan.allowed for index in plan.missing)
    if not complete:
        say(f"stopped by the quota of {readable(job.quota_bytes or 0)}; --resume continues")
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
                write_embedding(job.directory, tensors["embed_tokens"])
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
    *,
    on_progress: Callable[[Written], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Write missing shards until all are claimed, then wait for those of other processes. Returns
    how many this process wrote. Call `begin_cache` first."""
    indices = [index for index in plan.missing if index < plan.allowed]
    missing = {job.shard_path(index).name: index for index in indices}
    disk, last_reported = Disk(job, on_progress, module_of(target)), 0

    def waiting(shards: int) -> None:
        nonlocal last_reported
        disk.check()
        if shards != last_reported:
            say(f"waiting for {shards} shard{'s'[: shards > 1]} that other processes are writing")
        last_reported = shards

    with disk:
        names = claims.share(
            missing, lambda name: plan.is_written(job, missing[name]), waiting=waiting
        )
        written = capture(job, target, disk, (missing[name] for name in names))
    if not (job.directory / MANIFEST).exists():  # the cache was removed meanwhile
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
    """`write_shards` for ranks that share a target and must therefore ask it equally often: each
    writes a share that is fixed in advance. A shard that another precompute writes meanwhile is
    written twice, with the same bytes."""
    plan = world.from_main(plan)
    with Disk(job, on_progress, module_of(target)) as disk:
        written = capture(job, target, disk, _share(plan, world.rank, world.size))
    for _ in range(_joins_needed(job, plan, world)):
        target.join()
    return written


def _share(plan: CachePlan, rank: int, world_size: int) -> list[int]:
    """The missing shards that one rank writes."""
    return [index for index in plan.missing if index < plan.allowed][rank::world_size]


def _joins_needed(job: CacheJob, plan: CachePlan, world: World) -> int:
    """How many times this rank must join: it asks that much less often than the busiest rank."""
    sizes = [
        min(len(job.rows), (index + 1) * job.shard_size) - index * job.shard_size
        for index in range(len(plan.shard_bytes))
    ]
    asks = [
        sum(-(-sizes[index] // job.batch_size) for index in _share(plan, rank, world.size))
        for rank in range(world.size)
    ]
    return max(asks) - asks[world.rank]
