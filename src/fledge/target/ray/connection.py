"""The connection of this process to a Ray cluster, and the status of each run on it.

All actors of fledge are in one namespace; a run's workers and its board are named after the run.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from fledge.core.errors import BadInput, MissingPackage, first_line
from fledge.core.install import install_extra

NAMESPACE = "fledge"
_BOARD = ".board"
_READ_TIMEOUT_S = 10.0


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


class Board:
    """The actor that holds the latest reports of a run's processes, by kind (targets, ranks, run)
    and name. Nothing depends on it: if it is lost, only a few figures are."""

    def __init__(self, run: str) -> None:
        self._run, self._stopping = run, False
        self._reports: dict[str, dict[str, dict[str, Any]]]
        self._reports = {"targets": {}, "ranks": {}, "run": {}}
        self._processes: dict[tuple[str, str], set[tuple[str, int]]] = {}

    def tell(self, kind: str, name: str, facts: dict[str, Any]) -> None:
        """Store a report; a name that reports from another process has been restarted."""
        if "pid" in facts:
            processes = self._processes.setdefault((kind, name), set())
            processes.add((facts["node_id"], facts["pid"]))
            facts = {**facts, "restarts": len(processes) - 1}
        self._reports[kind][name] = {**facts, "told_at": time.monotonic()}

    def forget(self, kind: str) -> None:
        """Drop all reports of a kind."""
        self._reports[kind].clear()

    def stop(self) -> None:
        """Ask the ranks to save and end."""
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping

    def read(self) -> dict[str, Any]:
        """All reports, each with its age in seconds."""
        now, board = time.monotonic(), dict[str, Any](name=self._run)
        for kind, reports in self._reports.items():
            board[kind] = {
                name: {**facts, "told_s_ago": now - facts["told_at"]}
                for name, facts in sorted(reports.items())
            }
        return board


def make_board(run: str) -> Any:
    """A run's board, created on this machine if there is none yet: it must not be lost with some
    other machine."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Board)
    return actor.options(
        name=run + _BOARD, namespace=NAMESPACE, get_if_exists=True, scheduling_strategy=this_node
    ).remote(run)


def read_boards() -> list[dict[str, Any]]:
    """The boards of all runs on this cluster; a board that does not answer is left out."""
    ray = import_ray()
    boards = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].endswith(_BOARD):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it ended meanwhile
                board = ray.get_actor(actor["name"], namespace=NAMESPACE)
                boards.append(ray.get(board.read.remote(), timeout=_READ_TIMEOUT_S))
    return sorted(boards, key=lambda board: str(board["name"]))


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
