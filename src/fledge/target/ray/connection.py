"""The connection of this process to a Ray cluster.

All actors of fledge are in one namespace; a run's workers are named after the run.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fledge.core.errors import BadInput, MissingPackage, first_line
from fledge.core.install import install_extra

NAMESPACE = "fledge"


def import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        fix = install_extra("cluster")
        raise MissingPackage("ray is not installed", fix=fix) from error
    return ray


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Take part in a cluster. If this process does already, as inside a Ray worker or perhaps a
    notebook, nothing is opened, and nothing closed."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    _join(ray, address)
    stdout, sys.stdout = sys.stdout, _StdoutWithoutRay(sys.stdout)
    try:
        yield
    finally:
        with contextlib.redirect_stdout(sys.stderr):  # it flushes buffered messages
            ray.shutdown()
        sys.stdout = stdout


class _StdoutWithoutRay:
    """stdout without the messages of Ray's own threads, which go to stderr: `--json | jq` must work
    even while machines fail."""

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout

    def write(self, text: str) -> Any:
        from_ray = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if from_ray else self.stdout).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stdout, name)


def _join(ray: Any, address: str) -> None:
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"no Ray cluster answers at {address!r} ({first_line(error)})",
            where="address",
            fix="ray start --head starts one here; or name the head of a running one, HOST:6379",
        ) from error
    finally:
        # Ray's handler would end the process at SIGTERM; ours lets the run save first
        if in_main_thread and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def cause_of(error: Any) -> Exception:
    """What was raised inside a task or an actor, if it could be serialized."""
    cause: Exception = error.cause if isinstance(error.cause, Exception) else error
    return cause


def terminate(node_id: str, pid: int) -> None:
    """Send SIGTERM to a process on any machine of the cluster, without waiting for its end."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def kill() -> None:
        os.kill(pid, signal.SIGTERM)

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    import_ray().remote(num_cpus=0, scheduling_strategy=there)(kill).remote()


def bundle(cpus: float, gpus: float) -> dict[str, float]:
    """The resources of one worker or rank, as a placement group names them."""
    amounts = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    return amounts or {"CPU": 0.001}


@contextlib.contextmanager
def reserved(
    bundles: list[dict[str, float]], *, strategy: str, wait_s: float
) -> Iterator[list[Any] | None]:
    """Resources on the cluster, as the scheduling strategies of their bundles; None if there is no
    room. When a machine is lost, Ray reserves its part on another one."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(bundles, strategy=strategy)
    try:
        yield (
            [
                PlacementGroupSchedulingStrategy(
                    group,
                    placement_group_bundle_index=index,
                    placement_group_capture_child_tasks=True,
                )
                for index in range(len(bundles))
            ]
            if group.wait(wait_s)
            else None
        )
    finally:
        remove_placement_group(group)
