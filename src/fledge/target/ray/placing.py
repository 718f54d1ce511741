"""Targets on a cluster: each worker of a run is an ordinary target server. Workers are started
once, and all ranks find them under the run's name.

They live as long as the process that started them: the first rank, or `fledge cluster train`, in
which case a restart of the ranks does not reload the target. Ray ends them when that process is
gone.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fledge.core.errors import TargetUnreachable
from fledge.core.machine import find_device
from fledge.target.kinds import EngineTarget, LoadedTarget, kind_of
from fledge.target.ray.connection import NAMESPACE, bundle, connected, import_ray, reserved
from fledge.target.ray.kind import RayTarget
from fledge.target.remote.server.app import TargetServer
from fledge.target.remote.server.run import Address, make_uvicorn

FLEET_VARIABLE = "FLEDGE_RAY_TARGETS"  # name of the workers, if another process started them
_POLL_EVERY_S = 0.2

Workers = tuple[tuple[str, Any], ...]  # (name, actor)


class TargetWorker:
    """The actor that holds one target.

    It loads the target when it is first asked for the server's address, rather than in its
    constructor: a missing model is then an error that the caller gets, and not an actor that dies
    over and over.
    """

    def __init__(self, section: LoadedTarget, *, aux_layers: int, gpus: float) -> None:
        self._section = section.model_copy(update={"supervision": "hidden"})
        self._aux_layers, self._device = aux_layers, "cuda" if gpus else "cpu"
        self._address: tuple[str, str] | None = None

    def serve(self) -> tuple[str, str]:
        """Load the target and serve it; returns the server's address and its token."""
        if self._address is None:
            address = Address(host=import_ray().util.get_node_ip_address(), port=0)
            section, token = self._section, secrets.token_hex(32)
            device = find_device(self._device)
            backend = kind_of(section).open(section, device=device, aux_layers=self._aux_layers)
            server = TargetServer(backend, model=section.model, engine=section.backend, token=token)
            bound = address.bind()
            bound.listen(2048)
            web = make_uvicorn(server, drain_s=0)
            threading.Thread(target=web.run, args=([bound],), daemon=True).start()
            self._address = address.url(bound), token
        return self._address

    def place(self) -> tuple[str, int]:
        """The node and the process that it runs in."""
        return import_ray().get_runtime_context().get_node_id(), os.getpid()


def open_fleet(section: RayTarget, *, aux_layers: int) -> tuple[Workers, Callable[[], None]]:
    """Start or find the workers of this run; also returns how to release them."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    with ExitStack() as undo:
        undo.enter_context(connected(section.address))
        name = os.environ.get(FLEET_VARIABLE)
        started = name is not None
        if name is None:
            names = [f"run-{secrets.token_hex(4)}"]
            if ranks > 1:
                dist.broadcast_object_list(names, src=0)
            name = names[0]
        if started or (ranks > 1 and dist.get_rank()):
            workers = find_fleet(name, section.workers, wait_s=section.wait_s)
        else:
            workers = undo.enter_context(start_fleet(section, aux_layers=aux_layers, name=name))
        import_ray().wait([actor.serve.remote() for _, actor in workers])  # until one is loaded
        return workers, undo.pop_all().close


@contextmanager
def start_fleet(section: RayTarget, *, aux_layers: int, name: str) -> Iterator[Workers]:
    """Start workers under this name; they end with the context."""
    inner = section.inner()
    if (path := Path(inner.model).expanduser()).exists():  # a worker runs in another directory
        inner = inner.model_copy(update={"model": str(path.absolute())})
    with connected(section.address), ExitStack() as undo:
        ray = import_ray()
        gpus = section.worker_gpus
        if gpus is None:
            tp_size = inner.tp_size if isinstance(inner, EngineTarget) else 1
            gpus = tp_size if ray.cluster_resources().get("GPU", 0) else 0
        workers = []
        for index, place in enumerate(undo.enter_context(_reserved(section, gpus))):
            worker = f"{name}.target-{index}"
            actor = ray.remote(TargetWorker).options(
                name=worker,
                namespace=NAMESPACE,
                num_cpus=section.worker_cpus,
                num_gpus=gpus,
                max_restarts=-1,  # the rank that asked repeats the question that was in flight
                scheduling_strategy=place,
            )
            workers.append((worker, actor.remote(inner, aux_layers=aux_layers, gpus=gpus)))
            undo.callback(ray.kill, workers[-1][1])
        yield tuple(workers)


def find_fleet(name: str, count: int, *, wait_s: float) -> Workers:
    """Find workers that another process starts or has started; waits up to `wait_s`."""
    ray, deadline = import_ray(), time.monotonic() + wait_s
    names = [f"{name}.target-{index}" for index in range(count)]
    while True:
        try:
            actors = [ray.get_actor(worker, namespace=NAMESPACE) for worker in names]
            return tuple(zip(names, actors, strict=True))
        except ValueError as error:
            if time.monotonic() >= deadline:
                what = f"the target workers {name} are not on this cluster"
                raise TargetUnreachable(what, fix="run the same command again") from error
            time.sleep(_POLL_EVERY_S)


@contextmanager
def _reserved(section: RayTarget, gpus: float) -> Iterator[list[Any]]:
    """Places for all workers."""
    one, strategy = bundle(section.worker_cpus, gpus), section.placement.upper()
    with reserved([one] * section.workers, strategy=strategy, wait_s=section.wait_s) as places:
        if places is None:
            free = import_ray().available_resources()
            room = ", ".join(f"{free.get(name, 0):g} {name}" for name in one)
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in one.items())
            raise TargetUnreachable(
                f"no room for {section.workers} target workers of {wanted} each (free: {room})",
                where="target.workers",
                fix="lower it or target.worker_cpus, or give the cluster more machines",
            )
        yield places
