"""The status of a run, reported by its workers and ranks and shown by `fledge cluster status`.

A small actor on the machine where the run was started. Nothing depends on it: if it is lost, only a
few figures are.
"""

import time
from typing import Any

from fledge.target.ray.connection import NAMESPACE, import_ray

_SUFFIX = ".board"
_READ_TIMEOUT_S = 10.0


class Board:
    """The actor: the latest reports, by kind (targets, ranks, run) and name."""

    def __init__(self, run: str) -> None:
        self._run, self._stopping = run, False
        self._reports: dict[str, dict[str, dict[str, Any]]] = {
            "targets": {},
            "ranks": {},
            "run": {},
        }
        self._processes: dict[tuple[str, str], set[tuple[str, int]]] = {}

    def tell(self, kind: str, name: str, facts: dict[str, Any]) -> None:
        """Store a report; a name that reports from another process has been restarted."""
        if "pid" in facts:
            processes = self._processes.setdefault((kind, name), set())
            processes.add((facts.get("node_id", ""), facts["pid"]))
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
    """Get a run's board, created on this machine if there is none yet.

    Pinned to this machine (not `soft`): elsewhere it would be lost with some other machine.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Board)
    return actor.options(
        name=run + _SUFFIX, namespace=NAMESPACE, get_if_exists=True, scheduling_strategy=this_node
    ).remote(run)


def find_board(run: str) -> Any:
    return import_ray().get_actor(run + _SUFFIX, namespace=NAMESPACE)


def read_boards() -> list[dict[str, Any]]:
    """The boards of all runs on this cluster; a board that does not answer is left out."""
    ray = import_ray()
    boards = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE or not actor["name"].endswith(_SUFFIX):
            continue
        try:
            board = find_board(actor["name"].removesuffix(_SUFFIX))
            boards.append(ray.get(board.read.remote(), timeout=_READ_TIMEOUT_S))
        except (ValueError, ray.exceptions.RayError):  # it ended meanwhile
            continue
    return sorted(boards, key=lambda board: str(board["name"]))
