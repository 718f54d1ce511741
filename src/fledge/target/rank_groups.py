"""Ranks that run one target together: which must run the same rows, and which as many passes.

A forward pass of a sharded model is a collective. Its ranks are related in one of two ways:

    same rows     tensor parallelism and context parallelism: each computes a part of every pass
    same passes   FSDP2: each runs its own rows, but gathers every layer with the others

Trainers are data parallel: ranks ask about different rows, some about none. So ranks of the first
kind exchange their rows and run all of them in turn; ranks of the second kind agree on the number
of passes before the first one, and those with fewer add idle passes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fledge.core.rows import TokenBatch


class RankGroups:
    """The process groups with which this rank runs the target."""

    def __init__(
        self,
        same_rows: Sequence[dist.ProcessGroup],
        same_passes: Sequence[dist.ProcessGroup],
        device: torch.device,  # whose tensors the groups' backend communicates
    ) -> None:
        self.same_rows, self.same_passes = list(same_rows), list(same_passes)
        self._device = device

    def exchange(self, rows: TokenBatch | None) -> tuple[list[TokenBatch], int | None]:
        """The rows of all ranks, without duplicates and in the same order on every rank, and the
        index of this rank's own."""
        batches = [None if rows is None else rows.map(lambda tensor: tensor.cpu())]
        for group in self.same_rows:
            gathered: list[list[TokenBatch | None]] = [
                [] for _ in range(dist.get_world_size(group))
            ]
            dist.all_gather_object(gathered, batches, group=group)
            batches = [batch for of_rank in gathered for batch in of_rank]
        questions: list[TokenBatch] = []
        for batch in batches:  # ranks that share a long row ask the same question
            if batch is not None and not any(_equal(batch, other) for other in questions):
                questions.append(batch)
        if rows is None:
            return questions, None
        own = rows.map(lambda tensor: tensor.cpu())
        return questions, next(i for i, batch in enumerate(questions) if _equal(own, batch))

    def most(self, passes: int) -> int:
        """The largest number of passes that any rank has to run."""
        if not self.same_passes:
            return passes
        count = torch.tensor(passes, device=self._device)
        for group in self.same_passes:  # one mesh dimension after the other
            dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        return int(count)


def _equal(batch: TokenBatch, other: TokenBatch) -> bool:
    pairs = zip(batch.arguments(), other.arguments(), strict=True)
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in pairs
    )


def find_rank_groups(
    model: nn.Module, cp_mesh: DeviceMesh | None, device: torch.device
) -> RankGroups | None:
    """How the ranks that hold a part of this model work together; None if this rank works alone.

    FSDP2 shards every weight of its modules along its own dimensions of the mesh, tensor
    parallelism only the large ones. A dimension that could be either counts as tensor parallelism:
    that is always correct, and at worst slower.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    by_mesh = {mesh: _groups(mesh) for mesh in meshes}
    all_groups = {name: group for groups in by_mesh.values() for name, group in groups.items()}
    fsdp_names: set[str] = set()
    if by_mesh and any(isinstance(module, FSDPModule) for module in model.modules()):
        fsdp_names = set.intersection(*(set(groups) for groups in by_mesh.values()))
        fsdp_names -= {name for mesh in by_mesh for name in _groups(mesh, only="tp")}
    same_rows = [group for name, group in sorted(all_groups.items()) if name not in fsdp_names]
    same_passes = [group for name, group in sorted(all_groups.items()) if name in fsdp_names]
    if cp_mesh is not None and cp_mesh.size() > 1:
        same_rows += _groups(cp_mesh).values()
    return RankGroups(same_rows, same_passes, device) if same_rows or same_passes else None


def _groups(mesh: DeviceMesh, only: str | None = None) -> dict[str, dist.ProcessGroup]:
    """The process groups of this rank along a mesh's dimensions, except groups of a single rank."""
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    groups = [
        mesh.get_group(dim)
        for dim, name in enumerate(names)
        if mesh.size(dim) > 1 and only in (None, name)
    ]
    return {group.group_name: group for group in groups}
