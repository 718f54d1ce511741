"""Ranks that run one target together: who must run the same rows, and who as many passes.

A forward pass of a sharded model is a collective. Its ranks stand to each other in one of two ways:

    same rows     tensor parallelism and context parallelism: each computes a part of every pass
    same passes   FSDP2: each runs its own rows, but fetches every layer with the others

Trainers are data parallel: ranks ask about different rows, some about none. So ranks of the first
kind tell each other their rows and run each of them in turn; ranks of the second kind agree on the
number of passes before the first, and those with fewer add idle ones.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fledge.core.rows import TokenBatch


class Together:
    """The process groups that this rank answers with."""

    def __init__(
        self,
        same_rows: Sequence[dist.ProcessGroup],
        same_passes: Sequence[dist.ProcessGroup],
        device: torch.device,  # that the groups' backend communicates from
    ) -> None:
        self.same_rows, self.same_passes = list(same_rows), list(same_passes)
        self._device = device

    def exchange(self, rows: TokenBatch | None) -> tuple[list[TokenBatch], int | None]:
        """What all ranks ask, each question once and in the same order everywhere, and which of
        them is ours."""
        asked = [None if rows is None else rows.map(lambda tensor: tensor.cpu())]
        for group in self.same_rows:
            heard: list[list[TokenBatch | None]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(heard, asked, group=group)
            asked = [one for several in heard for one in several]
        questions: list[TokenBatch] = []
        for one in asked:  # ranks that share a long row ask the same
            if one is not None and not any(_same(one, other) for other in questions):
                questions.append(one)
        if rows is None:
            return questions, None
        ours = rows.map(lambda tensor: tensor.cpu())
        return questions, next(i for i, one in enumerate(questions) if _same(ours, one))

    def most(self, passes: int) -> int:
        """The largest number of passes that any rank has to run."""
        if not self.same_passes:
            return passes
        count = torch.tensor(passes, device=self._device)
        for group in self.same_passes:  # of a mesh: along one dimension after the other
            dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        return int(count)


def _same(one: TokenBatch, other: TokenBatch) -> bool:
    pairs = zip(one.arguments(), other.arguments(), strict=True)
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in pairs
    )


def find_together(
    model: nn.Module, cp_mesh: DeviceMesh | None, device: torch.device
) -> Together | None:
    """How the ranks that hold a part of this model work together; None: this one works alone.

    FSDP2 shards every weight of its modules along its own dimensions of the mesh, tensor
    parallelism the large ones only. A dimension that could be either counts as the second: that is
    always right, and at worst slower.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    found = {mesh: _groups(mesh) for mesh in meshes}
    every = {name: group for groups in found.values() for name, group in groups.items()}
    fetched: set[str] = set()
    if found and any(isinstance(module, FSDPModule) for module in model.modules()):
        fetched = set.intersection(*(set(groups) for groups in found.values()))
        fetched -= {name for mesh in found for name in _groups(mesh, only="tp")}
    same_rows = [group for name, group in sorted(every.items()) if name not in fetched]
    same_passes = [group for name, group in sorted(every.items()) if name in fetched]
    if cp_mesh is not None and cp_mesh.size() > 1:
        same_rows += _groups(cp_mesh).values()
    return Together(same_rows, same_passes, device) if same_rows or same_passes else None


def _groups(mesh: DeviceMesh, only: str | None = None) -> dict[str, dist.ProcessGroup]:
    """The process groups of this rank along a mesh's dimensions, those of one rank left out."""
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    groups = [
        mesh.get_group(dim)
        for dim, name in enumerate(names)
        if mesh.size(dim) > 1 and only in (None, name)
    ]
    return {group.group_name: group for group in groups}
