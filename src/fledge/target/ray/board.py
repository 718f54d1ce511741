"""What goes on in a run, told by its workers and ranks, for whoever asks (`fledge cluster status`).

A small actor on the machine of whoever started the run. Nothing depends on it: when it is lost, so
are a few figures.
"""

import time
from typing import Any

from fledge.target.ray.connection import NAMESPACE, import_ray

_SUFFIX = ".board"
_ANSWER_S = 10.0


class Board:
    """The actor: what was told last, by kind (targets, ranks, run) and name."""

    def __init__(self, run: str) -> None:
        self._run, self._stopping = run, False
        self._told: dict[str, dict[str, dict[str, Any]]] = {"targets": {}, "ranks": {}, "run": {}}
        self._lives: dict[tuple[str, str], set[tuple[str, int]]] = {}

    def tell(self, kind: str, name: str, facts: dict[str, Any]) -> None:
        """Remember it; a name that comes from another process was started again."""
        if "pid" in facts:
            lives = self._lives.setdefault((kind, name), set())
            lives.add((facts.get("node_id", ""), facts["pid"]))
            facts = {**facts, "restarts": len(lives) - 1}
        self._told[kind][name] = {**facts, "told_at": time.monotonic()}

    def forget(self, kind: str) -> None:
        self._told[kind].clear()

    def stop(self) -> None:
        """Ask the ranks to save and end."""
        self._stopping = True

    def stopping(self) -> bool:
        return self._stopping

    def read(self) -> dict[str, Any]:
        """All of it, each with the seconds since it was told."""
        now, read = time.monotonic(), dict[str, Any](name=self._run)
        for kind, told in self._told.items():
            read[kind] = {
                name: {**facts, "told_s_ago": now - facts["told_at"]}
                for name, facts in sorted(told.items())
            }
        return read


def make_board(run: str) -> Any:
    """A run's board, on this machine; there is one, whoever comes first.

    Not where Ray likes (`soft`): it would lie on any machine, and be lost with that one.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Board)
    return actor.options(
        name=run + _SUFFIX, namespace=NAMESPACE, get_if_exists=True, scheduling_strategy=here
    ).remote(run)


def find_board(run: str) -> Any:
    return import_ray().get_actor(run + _SUFFIX, namespace=NAMESPACE)


def read_boards() -> list[dict[str, Any]]:
    """What every run of this cluster told last; a board that does not answer is left out."""
    ray = import_ray()
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE or not actor["name"].endswith(_SUFFIX):
            continue
        try:
            board = find_board(actor["name"].removesuffix(_SUFFIX))
            found.append(ray.get(board.read.remote(), timeout=_ANSWER_S))
        except (ValueError, ray.exceptions.RayError):  # it ended meanwhile
            continue
    return sorted(found, key=lambda told: str(told["name"]))
