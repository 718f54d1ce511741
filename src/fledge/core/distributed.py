"""Several processes (torchrun): ranks, and sums over all of them. A single process works, too.

Ranks form a mesh, `replicate x shard x context`, the last index running fastest:

    context     ranks that share their rows and take a slice of each (long rows)
    shard       ranks that share the draft's weights and optimizer moments (FSDP2)
    replicate   whole copies of that

Ranks that differ only in `context` read the same rows; all others read different ones: `data_rank`.

Gradients are summed explicitly after the last backward pass of a step instead of through DDP: the
loss is already divided by the count over all ranks, so a sum is exact, and ranks may have different
numbers of micro-batches.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fledge.core.errors import BadInput
from fledge.core.machine import find_device

T = TypeVar("T")
MESH = ("replicate", "shard", "context")


@dataclass(frozen=True)
class World:
    """This process's place among all ranks."""

    rank: int = 0
    size: int = 1
    shard: int = 1  # ranks that share one copy of the draft
    context: int = 1  # ranks that share their rows
    mesh: DeviceMesh | None = None  # with the dimensions of MESH; None: one process

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the rows, of `data_size`."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        return self.size // self.context

    @property
    def context_rank(self) -> int:
        """Index of this rank's slice of each row, of `context`."""
        return self.rank % self.context

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over all ranks; a parameter without a gradient counts as zeros."""
        if self.size == 1:
            return
        pending = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            pending.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in pending:
            work.wait()

    def copy_from_main(self, module: nn.Module) -> None:
        """Copy the main rank's weights and buffers to every rank."""
        if self.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def from_main(self, value: T) -> T:
        """The main rank's value, on every rank."""
        if self.size == 1:
            return value
        objects: list[T] = [value]
        dist.broadcast_object_list(objects, src=0)
        return objects[0]

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def pick_device(name: str) -> torch.device:
    """The named device; `auto` is this process's GPU if there is one, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join_world(device: torch.device, *, shard: int = 1, context: int = 1) -> World:
    """Join the other processes that torchrun started, if any. Call it once the data is ready."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size % (shard * context):
        what = f"{size} processes cannot be cut into {shard} (training.shard) x {context} "
        what += "(training.context)"
        raise BadInput(what, fix=f"start {shard * context} processes, or a multiple of it")
    if size == 1:
        return World()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (size // (shard * context), shard, context)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=MESH)
    return World(dist.get_rank(), size, shard, context, mesh)


def leave_world(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # all work is done: a rank may be gone already
            dist.barrier()
        dist.destroy_process_group()
