"""Place workers on a cluster: started once per run, found by all its ranks under the run's name.

They live as long as the process that started them: the first rank, or `fledge cluster train`, in
which case a restart of the ranks does not reload the target. Ray ends them when that process is
gone.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fledge.core.errors import TargetUnreachable
from fledge.target.kinds import EngineTarget, LoadedTarget
from fledge.target.ray.connection import NAMESPACE, connected, import_ray, make_board
from fledge.target.ray.kind import RayTarget
from fledge.target.ray.worker import TargetWorker

FLEET_VARIABLE = "FLEDGE_RAY_TARGETS"  # name of the workers, if another process started them
_POLL_EVERY_S = 0.2
_FIRST_SIGN_S = 10.0  # a process on a cluster takes a few seconds to start


Workers = tuple[tuple[str, Any], ...]  # (name, actor)


def open_fleet(section: RayTarget, *, aux_layers: int) -> tuple[Workers, Callable[[], None]]:
    """Start or find the workers of this run; also returns how to release them."""
    with ExitStack() as undo:
        undo.enter_context(connected(section.address))
        name = os.environ.get(FLEET_VARIABLE) or _agreed_name()
        if FLEET_VARIABLE not in os.environ and _rank() == 0:
            workers = undo.enter_context(start_fleet(section, aux_layers=aux_layers, name=name))
        else:
            workers = find_fleet(name, section.workers, wait_s=section.wait_s)
        calls = [actor.figures.remote() for _, actor in workers]
        import_ray().wait(calls, timeout=_FIRST_SIGN_S)
        return workers, undo.pop_all().close


@contextmanager
def start_fleet(section: RayTarget, *, aux_layers: int, name: str) -> Iterator[Workers]:
    """Start workers and a board under this name; they end with the context."""
    inner = _with_absolute_path(section.inner())
    with connected(section.address), ExitStack() as undo:
        ray = import_ray()
        gpus = _gpus(section, inner)
        board = make_board(name)
        undo.callback(_kill, board)
        group = _reserve(section, gpus)
        undo.callback(remove_group, group)
        workers = []
        for index in range(section.workers):
            worker = f"{name}.target-{index}"
            actor = ray.remote(TargetWorker).options(
                name=worker,
                namespace=NAMESPACE,
                num_cpus=section.worker_cpus,
                num_gpus=gpus,
                max_restarts=-1,  # the rank that asked repeats the question that was in flight
                scheduling_strategy=bundle_of(group, index),
            )
            options = {"aux_layers": aux_layers, "gpus": gpus, "board": board}
            workers.append((worker, actor.remote(f"target-{index}", inner, **options)))
            undo.callback(_kill, workers[-1][1])
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


def _agreed_name() -> str:
    """A new name that is the same on all ranks."""
    names = [f"run-{secrets.token_hex(4)}"]
    if _ranks() > 1:
        dist.broadcast_object_list(names, src=0)
    return names[0]


def _rank() -> int:
    return dist.get_rank() if _ranks() > 1 else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _with_absolute_path(inner: LoadedTarget) -> LoadedTarget:
    """The section with a local model's path made absolute: a worker runs in another directory."""
    path = Path(inner.model).expanduser()
    return inner.model_copy(update={"model": str(path.absolute())}) if path.exists() else inner


def _gpus(section: RayTarget, inner: LoadedTarget) -> float:
    if section.worker_gpus is not None:
        return section.worker_gpus
    tp_size = inner.tp_size if isinstance(inner, EngineTarget) else 1
    return tp_size if import_ray().cluster_resources().get("GPU", 0) else 0


def _reserve(section: RayTarget, gpus: float) -> Any:
    """Reserve resources for all workers. When a machine is lost, Ray reserves its part on another
    one; until then the other workers keep running."""
    ray = import_ray()
    from ray.util.placement_group import placement_group

    bundle = {"CPU": section.worker_cpus, "GPU": gpus}
    bundle = {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}
    group = placement_group([bundle] * section.workers, strategy=section.placement.upper())
    if not group.wait(section.wait_s):
        remove_group(group)
        free = ray.available_resources()
        room = ", ".join(f"{free.get(name, 0):g} {name}" for name in bundle)
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        raise TargetUnreachable(
            f"no room for {section.workers} target workers of {wanted} each (free: {room})",
            where="target.workers",
            fix="lower it or target.worker_cpus, or give the cluster more machines",
        )
    return group


def bundle_of(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
    )


def _kill(actor: Any) -> None:
    import_ray().kill(actor)


def remove_group(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)
