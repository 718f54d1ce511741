"""Several processes (torchrun): ranks, and sums over all of them. One process is the plain case.

Gradients are summed by hand after the last backward of a step instead of through DDP: the loss is
already divided by the count over all ranks, so a sum is exact, and ranks may hold different numbers
of micro-batches.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fledge.core.machine import find_device


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over all ranks; a rank that had nothing to do adds zeros."""
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
        """Give every rank the main rank's weights."""
        if self.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def pick_device(name: str) -> torch.device:
    """`auto` is this process's GPU when there is one, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join_world(device: torch.device) -> World:
    """Join the other processes that torchrun started, if any. Call it after the data is ready."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))


def leave_world(world: World) -> None:
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()
