"""Run the same work in many processes of a cluster, each of which claims unclaimed parts.

A worker is a Ray task that runs what the command runs without Ray, in a directory that all machines
share. The claims there (`core.claims`) divide the work: Ray only places the workers, and restarts
them when they die.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fledge.core.claims import Claims
from fledge.core.errors import BadInput
from fledge.core.progress import Progress, unwatched
from fledge.core.terminal import counted
from fledge.target.cache.job import CacheJob, announce, plan_cache, readable
from fledge.target.cache.manifest import CLAIMS, existing_shards
from fledge.target.cache.precompute import Done
from fledge.target.kinds import EngineTarget, TargetSection, loaded_sections
from fledge.target.ray.connection import cause_of, connected, import_ray

ResultT = TypeVar("ResultT")
_POLL_EVERY_S = 0.5
_MAX_RESTARTS = 10  # of a worker: one that keeps dying has a persistent cause
_FINISH_S = 10.0  # time for the other workers to return once one has found everything done
_KILL_S = 10.0  # time for killed workers to end
_DEAD_S = 5.0  # time until their claims can be told from those of the living


def gpus_of(section: TargetSection) -> int:
    """How many GPUs a worker needs to open this target itself."""
    if section.backend not in loaded_sections():
        what = f"target.backend={section.backend} does not run where it is asked"
        raise BadInput(what, where="--ray", fix="leave out --ray, or take target.backend=hf")
    return section.tp_size if isinstance(section, EngineTarget) else 1


@contextlib.contextmanager
def spread_over(
    address: str, *, workers: int | None = None, gpus: int = 1, device: str = ""
) -> "Iterator[Spread]":
    """Workers on a cluster: as many as requested, else one per GPU (or per `gpus` GPUs); without
    GPUs, or if none are requested, one per machine."""
    with connected(address):
        nodes = [n["Resources"] for n in import_ray().nodes() if n["Alive"]]
        needed = gpus if device != "cpu" and any(n.get("GPU") for n in nodes) else 0
        if needed:
            capacity = sum(int(node.get("GPU", 0) // needed) for node in nodes)
        else:
            capacity = sum(node.get("CPU", 0) >= 1 for node in nodes)
        if not capacity:
            what = f"no machine of the cluster has {f'{needed} GPUs' if needed else 'a CPU'}"
            raise BadInput(what, where="--ray", fix="give it a larger machine")
        yield Spread(workers or capacity, needed)


@dataclass(frozen=True)
class Spread:
    """Workers on a cluster that this process is part of."""

    workers: int
    gpus: int  # of each

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def run(self, work: Callable[[], ResultT], watch: Callable[[], None]) -> list[ResultT]:
        """The workers' results in the order in which they returned. A worker returns when all work
        is done, so those that have not started by then are not needed. `watch` is called
        periodically."""
        ray = import_ray()
        task = ray.remote(
            num_cpus=0 if self.gpus else 1,
            num_gpus=self.gpus,
            max_retries=_MAX_RESTARTS,
            max_calls=1,  # a new process, which ends afterwards
            scheduling_strategy="SPREAD",
        )(_run_in)
        pending = [task.remote(work, os.getcwd()) for _ in range(self.workers)]
        results, last_error, deadline = list[ResultT](), "", float("inf")
        try:
            while pending and time.monotonic() < deadline:
                ready, pending = ray.wait(pending, timeout=_POLL_EVERY_S)
                watch()
                for reference in ready:
                    try:
                        results.append(ray.get(reference))
                        deadline = min(deadline, time.monotonic() + _FINISH_S)
                    except ray.exceptions.RayTaskError as error:
                        raise cause_of(error) from None
                    except ray.exceptions.RayError as error:  # the others continue
                        last_error = type(error).__name__
        finally:  # an interrupt reaches workers late or never, and a kill loses nothing
            for reference in pending:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)
            if pending:
                ray.wait(pending, num_returns=len(pending), timeout=_KILL_S)
        if not results:
            what = f"all workers were lost, each {_MAX_RESTARTS} times ({last_error})"
            raise BadInput(what, fix="see Ray's logs; the same command goes on")
        return results


def _run_in(work: Callable[[], ResultT], directory: str) -> ResultT:
    os.chdir(directory)  # relative paths mean the same as where the command was run
    return work()


def execute_on_ray(
    spread: Spread,
    work: Callable[[], Done],
    job: CacheJob,
    progress: Progress = unwatched,
) -> Done:
    """As `execute`, by workers that run `work`: the same job, prepared on their machines."""
    plan = plan_cache(job)
    progress.say(announce(job, plan))
    progress.say(f"{counted(spread.workers, 'worker')} on the cluster")

    def watch() -> None:
        written = existing_shards(job.directory) & set(range(len(plan.shard_bytes)))
        rows = min(len(job.rows), len(written) * job.options.shard_size)
        n_bytes = sum(plan.shard_bytes[index] for index in written)
        progress("writing", rows, len(job.rows), "rows", readable(n_bytes))

    try:
        spread.run(work, watch)
    finally:  # remove the claims that killed workers left, once they are known to be dead
        claims, deadline = job.directory / CLAIMS, time.monotonic() + _DEAD_S
        while claims.exists() and time.monotonic() < deadline:
            with Claims(claims):
                pass
            time.sleep(0.1)
    written = len(existing_shards(job.directory) & set(plan.missing))
    return Done(plan.complete, sum(plan.shard_bytes), len(plan.done), written)
