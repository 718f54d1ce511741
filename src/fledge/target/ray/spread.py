"""The same work in many processes of a cluster, each of which claims what is nobody's.

A worker is a Ray task that runs what the command runs without Ray, in a directory that all machines
see. The claims there (`core.claims`) say who does what: Ray only places the workers, and starts
them again where they die.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from fledge.core.errors import BadInput
from fledge.target.kinds import EngineTarget, TargetSection, loaded_sections
from fledge.target.ray.connection import Connection, import_ray

ResultT = TypeVar("ResultT")
_LOOK_EVERY_S = 0.5
_RESTARTS = 10  # of a worker: one that dies over and over has a reason
_END_S = 10.0  # when a worker has found everything done: how long the others may take to see it
_STOP_S = 10.0  # in which a worker that is killed should be gone


def gpus_of(section: TargetSection) -> int:
    """How many GPUs a worker needs that opens this target itself."""
    if section.backend not in loaded_sections():
        what = f"target.backend={section.backend} does not run where it is asked"
        raise BadInput(what, where="--ray", fix="leave out --ray, or take target.backend=hf")
    return section.tp_size if isinstance(section, EngineTarget) else 1


class Spread(Generic[ResultT]):
    """Workers on a cluster: as many as asked for, else one for every GPU (or `gpus` of them); where
    there is no GPU, or none is wanted, one for every machine."""

    def __init__(
        self, address: str, *, workers: int | None = None, gpus: int = 1, device: str = ""
    ) -> None:
        self._connection = Connection(address)
        try:
            nodes = [n["Resources"] for n in import_ray().nodes() if n["Alive"]]
            wanted = gpus if device != "cpu" and any(n.get("GPU") for n in nodes) else 0
            self._gpus, self.device = wanted, "cuda" if wanted else "cpu"
            if wanted:
                room = sum(int(node.get("GPU", 0) // wanted) for node in nodes)
            else:
                room = sum(node.get("CPU", 0) >= 1 for node in nodes)
            if not room:
                what = f"no machine of the cluster has {f'{wanted} GPUs' if wanted else 'a CPU'}"
                raise BadInput(what, where="--ray", fix="give it a larger machine")
            self.workers = workers or room
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Spread[ResultT]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Callable[[], ResultT], watch: Callable[[], None]) -> list[ResultT]:
        """What the workers returned, the last one last. Each returns when all is done, so whoever
        has not begun by then is not needed. `watch` is called now and then."""
        ray = import_ray()
        task = ray.remote(
            num_cpus=0 if self._gpus else 1,
            num_gpus=self._gpus,
            max_retries=_RESTARTS,
            max_calls=1,  # a process of its own, which is gone afterwards
            scheduling_strategy="SPREAD",
        )(_begin)
        pending = [task.remote(work, os.getcwd()) for _ in range(self.workers)]
        results, lost, until = list[ResultT](), "", float("inf")
        try:
            while pending and time.monotonic() < until:
                ready, pending = ray.wait(pending, timeout=_LOOK_EVERY_S)
                watch()
                for reference in ready:
                    try:
                        results.append(ray.get(reference))
                        until = min(until, time.monotonic() + _END_S)
                    except ray.exceptions.RayTaskError as error:
                        raise _cause(error) from None
                    except ray.exceptions.RayError as error:  # the others go on
                        lost = type(error).__name__
        finally:
            _stop(pending)
        if not results:
            what = f"all workers were lost, each {_RESTARTS} times ({lost})"
            raise BadInput(what, fix="see Ray's logs; the same command goes on")
        return results


def _begin(work: Callable[[], ResultT], directory: str) -> ResultT:
    os.chdir(directory)  # relative paths mean the same as where the command was given
    return work()


def _cause(error: Any) -> BaseException:
    return error.cause if isinstance(error.cause, Exception) else error


def _stop(pending: list[Any]) -> None:
    """By force: an interrupt reaches a worker late or never, and nothing is lost by a kill."""
    ray = import_ray()
    for reference in pending:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(reference, force=True)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=_STOP_S)
