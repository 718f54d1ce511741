"""One draft over several ranks: `training.shard` of them share its weights, gradients and moments.

The engine is torch's FSDP2. What is ours is when it works. A rollout reads every weight at every
depth, so weights cannot come and go layer by layer, and hardly a gradient is complete before the
backward pass ends. Therefore a step gathers the weights once, computes with whole tensors exactly
as one process does, and sums and cuts the gradients after each backward:

    between steps        weights, gradients, moments: this rank's share of each
    `whole(draft)`       the weights are whole, for whoever reads them, methods and kernels alike
    `backward(...)`      gradients: whole for a moment, then summed over all ranks and cut

Precision is that of one process: masters, moments and the sums over ranks in float32. Matrices that
a step casts to its dtype once are gathered in that dtype; embedding and head, whose gradients are
summed in float32, are gathered as they are. Frozen weights are not cut: a step needs them whole,
and they have neither gradients nor moments.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from fledge.core.distributed import World
from fledge.draft.base import DraftModel


def shard_draft(draft: DraftModel, world: World, *, compute_dtype: torch.dtype | None) -> None:
    """Cut a draft that is whole and equal on all ranks; each keeps its share."""
    frozen = {p for p in draft.parameters() if not p.requires_grad}
    dtype = draft.dtype
    common: dict[str, Any] = {
        "mesh": _mesh(world, draft.device),
        "reshard_after_forward": False,
        "ignored_params": frozen,
    }
    as_they_are = _policy(None, dtype)
    for module in (draft.embed_tokens, draft.lm_head):
        if module.weight.requires_grad:
            fully_shard(module, mp_policy=as_they_are, **common)
    root = fully_shard(draft, mp_policy=_policy(compute_dtype, dtype), **common)
    # The loss is divided by the count over all ranks already: gradients are summed, not averaged.
    for part in _parts(draft):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    root.set_reshard_after_backward(False)
    register_fsdp_forward_method(draft, "reach_weights")
    with torch.no_grad():  # its first forward tells FSDP which module is the root
        draft.reach_weights()
    _reshard(draft)


def is_sharded(draft: nn.Module) -> bool:
    return isinstance(draft, FSDPModule)


@contextlib.contextmanager
def whole(draft: nn.Module) -> Iterator[None]:
    """Every weight is whole inside, on all ranks: all of them have to come here. A gradient that
    was not cut by `backward` is dropped at the end."""
    if not is_sharded(draft):
        yield
        return
    for part in _parts(draft):
        part.unshard()
    try:
        yield
    finally:
        draft.zero_grad(set_to_none=True)  # of the whole weights: the shares have theirs
        _reshard(draft)


def backward(draft: DraftModel, loss: Tensor | None) -> None:
    """The gradients of a micro-batch's loss. A sharded draft's are summed over the ranks right
    away, so a rank that has no micro-batch (None) where others have one adds nothing to theirs."""
    if is_sharded(draft):
        # No tensor goes in: FSDP would take its gradient for the end of the backward pass.
        nothing = draft.reach_weights()
        loss = nothing if loss is None else loss + nothing
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor put together from all ranks' shares, on all of them; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _policy(compute_dtype: torch.dtype | None, dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=dtype, cast_forward_inputs=False
    )


def _mesh(world: World, device: torch.device) -> DeviceMesh:
    """[copies, shard]; ranks that share their rows hold copies, whose gradients are summed as the
    others' are."""
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
