"""Real Ray clusters on this machine: a head node without CPUs, and nodes that come and go."""

import os
import time
from contextlib import contextmanager

import ray
import torch
from ray import cluster_utils

from fledge.core.rows import TokenBatch
from fledge.target.ray.connection import NAMESPACE
from fledge.target.ray.kind import RAY, RayTarget
from target.contract import packed_rows, some_documents

_STORE = 100 << 20


class Cluster:
    """A head node, and one more node for each of the given numbers of CPUs."""

    def __init__(self, *cpus):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._cluster = cluster_utils.Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False,
            },
        )  # fmt: skip
        self.nodes = [self.add(count) for count in cpus]
        self.address = self._cluster.address

    def add(self, cpus):
        return self._cluster.add_node(num_cpus=cpus, object_store_memory=_STORE)

    def remove(self, node):
        """Remove a node without warning, like a machine that loses power."""
        self._cluster.remove_node(node, allow_graceful=False)
        if node in self.nodes:
            self.nodes.remove(node)

    def node_of(self, node_id):
        [match] = [node for node in self.nodes if node.node_id == node_id]
        return match

    def shutdown(self):
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def cluster(*cpus):
    started = Cluster(*cpus)
    try:
        yield started
    finally:
        started.shutdown()


def until(condition, *, timeout_s=60):
    """Poll a condition until it is true; returns its value."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s} s")


def everything_is_free():
    """Whether fledge has left the cluster: no actor, no reserved CPU."""
    named = [a for a in ray.util.list_named_actors(all_namespaces=True) if NAMESPACE in a.values()]
    available, total = ray.available_resources(), ray.cluster_resources()
    return not named and available.get("CPU") == total.get("CPU")


def section(nodes, model, **options):
    options = {"dtype": "float32", "worker_cpus": 1, **options}
    return RayTarget(model=str(model), address=nodes.address, **options)


def opened(described):
    return RAY.open(described, device=torch.device("cpu"), aux_layers=3)


def batches(count):
    """Packed rows, all different."""
    for seed in range(count):
        yield TokenBatch(*packed_rows(some_documents(seed), 14))
