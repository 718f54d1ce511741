"""A target that several ranks hold together: the mesh, loading straight into shards, shared rows.

transformers builds the model on the meta device, we define which rank holds which part of each
weight, and its loader reads only those parts from the files. What a rank holds:

    tp      rows or columns of each matrix, by the architecture's own plan; experts by their width.
            Embedding and head are split along the vocabulary.
    fsdp    a slice of every weight; a layer is gathered only while it runs (FSDP2)
    cp      everything: these ranks share long rows, not weights (`RankSlots`)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from fledge.core.errors import BadInput, MissingPackage
from fledge.target.hf.one_row import attends_plainly, lent_attention
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

        for name in ("num_attention_heads", "num_key_value_heads"):  # attention is split by them
            heads = getattr(text_config(model.config), name, None)
            if isinstance(heads, int) and heads % tp.size():
                what = f"target.parallel.tp={tp.size()} does not divide its {heads} {name}"
                fix = "a tp that divides them, and target.parallel.fsdp for the rest of the ranks"
                raise BadInput(what, where=type(model).__name__, fix=fix)
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
    """The architecture's own plan; embedding and head are split along a divisible vocabulary."""
    plan = dict(model.tp_plan or {})
    if not plan:
        what, fix = (
            "transformers has no tensor-parallel plan for it",
            "target.parallel.fsdp, not tp",
        )
        raise BadInput(what, where=type(model).__name__, fix=fix)
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


NAME = "fledge_context"


@dataclass(frozen=True, eq=False)
class RankSlots:
    """This rank's slots of rows [N, L]: everything but attention works slot by slot.

    Rows are padded to 2n equal chunks, and rank r of n takes chunk r and chunk 2n - 1 - r, so that
    all ranks attend to equally many keys. For L = 12 and n = 2, the chunks of three slots, and the
    keys that their queries attend to:

        rank 0    slots 0 1 2      keys 0 .. 2         rank 1    slots 3 4 5    keys 0 .. 5
                  slots 9 10 11    keys 0 .. 11                  slots 6 7 8    keys 0 .. 8

    Before each attention the ranks gather keys and values (with grouped heads, a fraction of the
    states) rather than pass them around a ring: no softmax is merged from partial results, so
    windows cost nothing extra. After the pass every rank gathers the answer.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    length: int  # L
    hidden_NL: Tensor | None  # bool: masked keys (padding); None: all are real

    @property
    def chunk(self) -> int:
        """Slots per chunk; the last of the 2n chunks may extend past the end of the rows."""
        return -(-self.length // (2 * self.size))

    @property
    def chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def slots(self, device: torch.device) -> Tensor:
        """This rank's slots [Q], in the order in which it holds them."""
        offset = torch.arange(self.chunk, device=device)
        return torch.cat([chunk * self.chunk + offset for chunk in self.chunks])

    def take(self, tokens_NL: Tensor) -> Tensor:
        """[N, L] -> [N, Q]; slots past the end repeat the last token, and nothing attends to
        them."""
        return tokens_NL[:, self.slots(tokens_NL.device).clamp_max(self.length - 1)]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's slots, in order: [.., Q, ..] -> [.., L rounded up to chunks, ..]."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        halves = [rank_part.chunk(2, dim) for rank_part in parts]
        return torch.cat([low for low, _ in halves] + [high for _, high in reversed(halves)], dim)

    def whole(self, states_NQD: Tensor) -> Tensor:
        """The states of all ranks, [N, L, D]."""
        return self.gather(states_NQD, 1)[:, : self.length]


_active: ContextVar[RankSlots | None] = ContextVar("fledge_slots", default=None)


def rank_slots(mesh: Any, length: int, mask_NL: Tensor | None) -> RankSlots:
    """This rank's slots of rows of this length; `mask_NL` is 1 at real tokens."""
    hidden_NL = None
    if mask_NL is not None and not bool(mask_NL.all()):
        hidden_NL = mask_NL == 0
    return RankSlots(mesh.get_group(), mesh.get_local_rank(), mesh.size(), length, hidden_NL)


def check_shareable(model: nn.Module, mesh: Any) -> None:
    """Reject anything but a one-dimensional mesh, and a model whose layers mix slots in other ways
    than plain attention."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        fix = "pass one dimension of a torch.distributed DeviceMesh, or None"
        raise BadInput(f"cp_mesh of size {mesh.size()} is not a mesh of ranks", fix=fix)
    if not attends_plainly(model):
        what = f"cp_mesh of size {mesh.size()}: ranks cannot share rows of this architecture"
        fix = "shard the weights instead (target.parallel.fsdp or tp)"
        raise BadInput(what, where=type(model).__name__, fix=fix)


@contextmanager
def shared_rows(model: nn.Module, own: RankSlots) -> Iterator[None]:
    """While open, the model's attention uses the keys of all ranks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    token = _active.set(own)
    try:
        with lent_attention(model, NAME):
            yield
    finally:
        _active.reset(token)


def attend(
    module: nn.Module,
    query_NHQC: Tensor,
    key_NGQC: Tensor,
    value_NGQC: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: local queries, keys and values of all ranks."""
    own = _active.get()
    assert own is not None
    key_NGLC, value_NGLC = own.gather(key_NGQC, 2), own.gather(value_NGQC, 2)
    outputs = []
    for chunk, query_NHqC in zip(own.chunks, query_NHQC.chunk(2, 2), strict=True):
        begin, end = chunk * own.chunk, (chunk + 1) * own.chunk
        first = 0 if sliding_window is None else max(0, begin - sliding_window + 1)
        key_range = slice(first, end)
        visible = _visible(own, begin, key_range, sliding_window, query_NHqC.device)
        keys_values = key_NGLC[:, :, key_range], value_NGLC[:, :, key_range]
        outputs.append(
            F.scaled_dot_product_attention(
                query_NHqC,
                *keys_values,
                attn_mask=causal_lower_right(end - begin, end) if visible is None else visible,
                scale=scaling,
                enable_gqa=query_NHQC.shape[1] != key_NGQC.shape[1],
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


def _visible(
    own: RankSlots, begin: int, key_range: slice, window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys of `key_range` [K] a chunk's queries [q] may attend to: [q, K] or, with padding,
    [N, 1, q, K]. None means the causal rule alone, which GPU kernels implement without a mask."""
    if window is None and own.hidden_NL is None and device.type == "cuda":
        return None
    query_q = torch.arange(begin, key_range.stop, device=device)
    key_K = torch.arange(key_range.start, key_range.stop, device=device)
    distance_qK = query_q[:, None] - key_K
    visible_qK = distance_qK >= 0
    if window is not None:
        visible_qK &= distance_qK < window
    if own.hidden_NL is None:
        return visible_qK
    past_end = 2 * own.size * own.chunk - own.length
    hidden_NK = F.pad(own.hidden_NL.to(device), (0, past_end), value=True)[:, key_range]
    visible_NqK = visible_qK & ~hidden_NK[:, None]
    # a padding query without visible keys would give NaN, which spreads even through a weight of 0
    blind_Nq1 = ~visible_NqK.any(-1, keepdim=True)
    return (visible_NqK | (blind_Nq1 & (distance_qK == 0)))[:, None]
