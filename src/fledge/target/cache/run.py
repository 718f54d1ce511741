"""A cache job from its plan to its last shard: what every command that writes a cache runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from fledge.core.distributed import join_world, leave_world
from fledge.core.errors import BadInput
from fledge.core.files import removed
from fledge.target.base import Eagle3TargetBackend
from fledge.target.cache.job import describe_plan, readable
from fledge.target.cache.manifest import LOCK
from fledge.target.cache.precompute import (
    CacheJob,
    Outcome,
    Progress,
    begin_cache,
    check_disk,
    check_target,
    plan_cache,
    run_job,
)

STOPPED = 3  # exit code: by the quota, or a full disk


@dataclass(frozen=True)
class Done:
    """How a precompute ended."""

    code: int  # exit code
    predicted_bytes: int
    reused_shards: int
    outcome: Outcome


def execute(
    job: CacheJob,
    head_bytes: int,
    load: Callable[[], Eagle3TargetBackend],
    *,
    device: torch.device,
    say: Callable[[str], None],
    on_progress: Callable[[Progress], None] = lambda _: None,
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
        with _locked(job.directory, world.is_main):
            begin_cache(job, target, write=world.is_main)
            world.barrier()  # the manifest is there before the first shard
            outcome = run_job(
                job, plan, target, rank=world.rank, world=world.size, on_progress=on_progress
            )
    leave_world(world)
    if not outcome.complete:
        say(f"stopped by the quota of {readable(job.quota_bytes or 0)}; --resume continues")
    return Done(0 if outcome.complete else STOPPED, plan.total_bytes, len(plan.done), outcome)


@contextmanager
def _locked(directory: Path, main: bool) -> Iterator[None]:
    """Keep a second precompute out of the directory while one is at work."""
    if not main:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / LOCK, timeout=0):
            yield
            if not (directory / LOCK).exists():  # what was written before is not there any more
                raise removed(directory)
    except Timeout:
        raise BadInput("another precompute is writing here", where=str(directory)) from None
