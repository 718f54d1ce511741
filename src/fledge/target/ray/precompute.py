"""Fill a cache with workers on a Ray cluster: the part of the command that starts them."""

import time
from collections.abc import Callable
from pathlib import Path

from fledge.core.claims import Claims
from fledge.core.text import counted
from fledge.target.cache.capture import Written
from fledge.target.cache.job import CacheJob, check_disk, describe_plan, plan_cache
from fledge.target.cache.manifest import CLAIMS, existing_shards
from fledge.target.cache.precompute import Done, how_it_ended
from fledge.target.ray.spread import Spread

_DEAD_S = 5.0  # a killed worker may take a moment to end


def execute_on_ray(
    spread: Spread[Done],
    work: Callable[[], Done],
    job: CacheJob,
    head_bytes: int,
    *,
    say: Callable[[str], None],
    on_progress: Callable[[Written], None] = lambda _: None,
) -> Done:
    """As `execute`, by workers that run `work`: the same job, prepared on their machines."""
    plan = plan_cache(job, head_bytes=head_bytes)
    for line in describe_plan(job, plan, check_disk(job, plan)):
        say(line)
    say(f"{counted(spread.workers, 'worker')} on the cluster")

    def watch() -> None:
        written = existing_shards(job.directory) & set(range(len(plan.shard_bytes)))
        rows = min(len(job.rows), len(written) * job.shard_size)
        on_progress(Written(rows, sum(plan.shard_bytes[index] for index in written)))

    try:
        spread.run(work, watch)
    finally:
        _release_claims(job.directory / CLAIMS)
    written = len(existing_shards(job.directory) & set(plan.missing))
    return how_it_ended(job, plan, written, say)


def _release_claims(claims: Path) -> None:
    """Remove the claims that killed workers left, once they are known to be dead."""
    deadline = time.monotonic() + _DEAD_S
    while claims.exists() and time.monotonic() < deadline:
        with Claims(claims):
            pass
        time.sleep(0.1)
