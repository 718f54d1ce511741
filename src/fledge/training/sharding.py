"""A draft sharded over ranks: `training.shard` of them share its weights, gradients and moments.

This is torch's FSDP2 with a schedule of our own. A rollout reads every weight at every depth, so
weights cannot be gathered and freed layer by layer, and hardly any gradient is complete before the
backward pass ends. Therefore a step gathers the weights once, computes with whole tensors exactly
as a single process does, and sums and shards the gradients after each backward pass:

    between steps        weights, gradients, moments: this rank's share of each
    `whole(draft)`       the weights are whole, for all code that reads them
    `backward(...)`      gradients: whole for a moment, then summed over all ranks and sharded

Precision is that of a single process: master weights, moments and the sums over ranks are float32.
Matrices that a step casts to its dtype once are gathered in that dtype; embedding and head, whose
gradients are summed in float32, are gathered as they are. Frozen weights are not sharded: a step
needs them whole, and they have neither gradients nor moments.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from fledge.core.distributed import World

if TYPE_CHECKING:
    from fledge.methods.shared.draft import DraftModel


def shard_draft(draft: "DraftModel", world: World, *, compute_dtype: torch.dtype | None) -> None:
    """Shard a draft that is whole and equal on all ranks; each rank keeps its share."""
    frozen = {p for p in draft.parameters() if not p.requires_grad}
    dtype = draft.dtype
    common: dict[str, Any] = {
        "mesh": _mesh(world, draft.device),
        "reshard_after_forward": False,
        "ignored_params": frozen,
    }
    uncast = _policy(None, dtype)
    for module in (draft.embed_tokens, draft.lm_head):
        if module.weight.requires_grad:
            fully_shard(module, mp_policy=uncast, **common)
    root = fully_shard(draft, mp_policy=_policy(compute_dtype, dtype), **common)
    # The loss is already divided by the count over all ranks: gradients are summed, not averaged.
    for part in _parts(draft):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    root.set_reshard_after_backward(False)
    register_fsdp_forward_method(draft, "reach_weights")
    with torch.no_grad():  # the first forward is how FSDP determines the root module
        draft.reach_weights()
    _reshard(draft)


def is_sharded(draft: nn.Module) -> bool:
    return isinstance(draft, FSDPModule)


@contextlib.contextmanager
def whole(draft: nn.Module) -> Iterator[None]:
    """Context in which every weight is whole. Entering is a collective: all ranks must take part.
    A gradient that `backward` has not sharded is dropped at the end."""
    if not is_sharded(draft):
        yield
        return
    for part in _parts(draft):
        part.unshard()
    try:
        yield
    finally:
        draft.zero_grad(set_to_none=True)  # of the whole weights; the shares keep their own
        _reshard(draft)


def backward(draft: "DraftModel", loss: Tensor | None) -> None:
    """Compute the gradients of a micro-batch's loss. A sharded draft's are summed over the ranks
    right away, so a rank that has no micro-batch (None) joins the sum and adds nothing to it."""
    if is_sharded(draft):
        # Takes no tensor as input: FSDP would read its gradient as the end of the backward pass.
        zero = draft.reach_weights()
        loss = zero if loss is None else loss + zero
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor, sharded as `like` is; unchanged if that is whole."""
    if not isinstance(like, DTensor):
        return tensor
    mesh, placements = like.device_mesh, like.placements
    # every rank has the whole tensor, so nothing is sent; copied, or its share would keep all of it
    view = distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)
    return torch.empty_like(like).copy_(view)


def _policy(compute_dtype: torch.dtype | None, dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=dtype, cast_forward_inputs=False
    )


def _mesh(world: World, device: torch.device) -> DeviceMesh:
    """[copies, shard]. Ranks that share their rows (context parallelism) hold copies, whose
    gradients are summed like those of data-parallel copies."""
    ranks = torch.arange(world.size).view(-1, world.shard, world.context)
    copies = ranks.transpose(1, 2).reshape(-1, world.shard)
    if len(copies) == 1:
        return DeviceMesh(device.type, copies[0], mesh_dim_names=("shard",))
    return DeviceMesh(device.type, copies, mesh_dim_names=("copies", "shard"))


def _parts(draft: nn.Module) -> list[FSDPModule]:
    return [module for module in draft.modules() if isinstance(module, FSDPModule)]


def _reshard(draft: nn.Module) -> None:
    for part in _parts(draft):
        part.reshard()
