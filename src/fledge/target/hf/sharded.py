"""A target that several ranks hold together: the mesh, and loading straight into shards.

transformers builds the model without memory (on the meta device), we define which rank holds which
part of each weight, and its loader then reads only those parts from the files: no rank ever holds
the whole model, nor a whole matrix of it. What a rank holds:

    tp      rows or columns of each matrix, by the architecture's own plan; experts by their width.
            Embedding and head are split along the vocabulary.
    fsdp    a slice of every weight; a layer is gathered only while it runs (FSDP2)
    cp      everything: these ranks share long rows, not weights (`context`)
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fledge.core.errors import BadInput, MissingPackage
from fledge.target.layers import find_layers, text_config

MESH = ("replicate", "fsdp", "cp", "tp")  # tp varies fastest: adjacent ranks communicate the most


def target_mesh(device: torch.device, *, fsdp: int, cp: int, tp: int) -> DeviceMesh | None:
    """A mesh of all ranks, where `fsdp * cp * tp` of them hold one copy of the target; None if
    every rank has its own copy."""
    together = fsdp * cp * tp
    if together == 1:
        return None
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks % together:
        what = f"{ranks} process{'es' * (ranks > 1)} cannot hold targets of {fsdp} (fsdp) x {cp} "
        what += f"(cp) x {tp} (tp) ranks"
        fix = f"torchrun --nproc-per-node {together}, or a multiple of it"
        raise BadInput(what, where="target.parallel", fix=fix)
    shape = (ranks // together, fsdp, cp, tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=MESH)


def along(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """The dimension `name` of a mesh, if there is more than one rank along it."""
    if mesh is None or name not in (mesh.mesh_dim_names or ()):
        return None
    part = mesh[name]
    return part if part.size() > 1 else None


def sharded_class(model_class: Any, mesh: DeviceMesh, device: torch.device) -> Any:
    """A model class whose `from_pretrained` loads only this rank's part."""

    class Sharded(model_class):  # type: ignore[misc]  # any architecture of transformers
        @classmethod
        def prepare_distribute_model(
            cls, config: Any, *, device_mesh: Any = None, device_map: Any = None
        ) -> tuple[Any, Any, Any]:
            return config, device, mesh

        @classmethod
        def maybe_distribute_model(cls, model: nn.Module, config: Any, device_mesh: Any) -> Any:
            model.__class__ = model_class
            return shard(model, tp=along(mesh, "tp"), fsdp=along(mesh, "fsdp"))

    Sharded.__name__ = model_class.__name__
    return Sharded


def loading_options(mesh: DeviceMesh) -> dict[str, Any]:
    """Further arguments of `from_pretrained` for a sharded class."""
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # noqa: F401
    except ImportError as error:
        what = "sharded targets need transformers 5.17 or newer"
        raise MissingPackage(what, fix="pip install -U transformers") from error
    tp, fsdp = along(mesh, "tp"), along(mesh, "fsdp")
    sizes = {"tp_size": 1 if tp is None else tp.size()}
    sizes["fsdp_size"] = 1 if fsdp is None else fsdp.size()
    return {"distributed_config": DistributedConfig(**sizes)}


def shard(model: Any, *, tp: DeviceMesh | None, fsdp: DeviceMesh | None) -> Any:
    """Shard a model on the meta device: first by tensor parallelism, then by FSDP2."""
    if tp is not None:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        _check_heads(model, tp.size())
        model.tp_plan = _plan(model, tp.size())
        apply_tensor_parallelism(model, tp)
    if fsdp is not None:
        from torch.distributed.fsdp import fully_shard

        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        if getattr(text_config(model.config), "tie_word_embeddings", False):
            ends = []  # one weight, used at both ends: it belongs to the root module's FSDP unit
        for module in (*find_layers(model), *ends):
            if module is not None:
                fully_shard(module, mesh=fsdp)
        fully_shard(model, mesh=fsdp, reshard_after_forward=True)
    return model


def _plan(model: Any, size: int) -> dict[str, str]:
    """The architecture's own plan, with embedding and head split along the vocabulary if its size
    is divisible."""
    plan = dict(model.tp_plan or {})
    if not plan:
        raise BadInput(
            "transformers has no tensor-parallel plan for it",
            where=type(model).__name__,
            fix="target.parallel.fsdp instead of tp",
        )
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    divisible = embedding.weight.shape[0] % size == 0
    for module, style in ((embedding, "embedding_rowwise"), (head, "colwise_gather_output")):
        if module is None:
            continue
        if divisible:
            plan[names[module]] = style
        else:
            plan.pop(names[module], None)
    return plan


def _check_heads(model: Any, size: int) -> None:
    """Reject a `tp` that does not divide the heads and key-value heads that attention is split
    by."""
    config = text_config(model.config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise BadInput(
                f"target.parallel.tp={size} does not divide its {heads} {name}",
                where=type(model).__name__,
                fix="a tp that divides them, and target.parallel.fsdp for the rest of the ranks",
            )
