"""Shared base of the backends that run the target in this process.

Moves rows to the device, runs padded rows as they are and packed rows document by document, and
derives probabilities if requested. A subclass implements the forward pass.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.core.transfer import on_device
from fledge.target.base import Eagle3TargetBackend, TargetInfo, check_token_ids
from fledge.target.layers import AuxBuffer, inner_layers, stated
from fledge.target.packing import Documents, Group, find_documents, group_documents, plan_groups
from fledge.target.weights import tokenizer_fingerprint


class RankGroups:
    """The process groups with which this rank runs the target, as a sharded pass is a collective:

        same rows     tensor parallelism and context parallelism: each computes a part of every pass
        same passes   FSDP2: each runs its own rows, but gathers every layer with the others

    Trainers are data parallel: ranks ask about different rows, some about none. So ranks of the
    first kind exchange their rows and all run every one; ranks of the second kind agree on the
    number of passes before the first one, and those with fewer add idle passes."""

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
        own = None if rows is None else rows.map(Tensor.cpu)
        batches = [own]
        for group in self.same_rows:
            gathered: list[list[TokenBatch | None]] = [[] for _ in range(group.size())]
            dist.all_gather_object(gathered, batches, group=group)
            batches = [batch for of_rank in gathered for batch in of_rank]
        questions: list[TokenBatch] = []
        for batch in batches:  # ranks that share a long row ask the same question
            if batch is not None and not any(_equal(batch, other) for other in questions):
                questions.append(batch)
        same = (i for i, batch in enumerate(questions) if own is not None and _equal(own, batch))
        return questions, next(same, None)

    def most(self, passes: int) -> int:
        """The largest number of passes that any rank has to run."""
        if not self.same_passes:
            return passes
        count = torch.tensor(passes, device=self._device)
        for group in self.same_passes:  # one mesh dimension after the other
            dist.all_reduce(count, dist.ReduceOp.MAX, group=group)
        return int(count)


def _equal(batch: TokenBatch, other: TokenBatch) -> bool:
    mine, theirs = ([t for t in rows.arguments() if t is not None] for rows in (batch, other))
    return len(mine) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
    )


def find_rank_groups(
    model: nn.Module, cp_mesh: DeviceMesh | None, device: torch.device
) -> RankGroups | None:
    """How the ranks that hold a part of this model work together; None if this rank works alone.

    FSDP2 shards every weight along its dimensions of the mesh, tensor parallelism only large ones.
    One that could be either counts as tensor parallelism: correct, and at worst slower."""
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


class InProcessTarget(Eagle3TargetBackend):
    """A target whose forward is called directly."""

    overhead_tokens: int  # cost of one more forward pass, in tokens; see `packing`
    tokenizer: Any
    _answers_logits: bool  # whether `_forward` returns logits rather than last hidden states
    _depth: int  # number of decoder layers
    _info: TargetInfo | None = None
    _rank_groups: RankGroups | None = None  # the ranks that share the target with this one

    if TYPE_CHECKING:

        @property
        def model(self) -> Any: ...  # it exposes `.config` and `.parameters()`

    @abstractmethod
    def _forward(self, ids: Tensor, mask: Tensor, aux: AuxBuffer, group: Group | None) -> Tensor:
        """Run one pass over some rows: write aux states to `aux` and return the unshifted answer.

        Without `group` the rows are those of the batch; with it, they are documents, padded on the
        right only, where a causal model cannot see the padding.
        """

    @abstractmethod
    def _head_of_states(self) -> TargetHead:
        """The head that turns the returned states into logits."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """The fields of `TargetInfo` that follow from neither the head nor the tokenizer."""

    def _device(self) -> torch.device:
        """The device that token ids must be on."""
        first = next(iter(self.model.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def info(self) -> TargetInfo:
        self._check_open()
        if self._info is None:
            head = self._head_of_states()
            self._info = TargetInfo(
                head=head,
                hidden_size=head.weight_VD.shape[1],
                vocab_size=head.weight_VD.shape[0],
                depth=self._depth,
                tokenizer_fingerprint=self._tokenizer_fingerprint(),
                **self._facts(),
            )
        return self._info

    def _tokenizer_fingerprint(self) -> str | None:
        return None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer)

    @torch.no_grad()
    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """Run the target: documents of packed rows apart (see `packing`), padded rows as they are,
        under their mask. Ranks that share the target run each other's rows too."""
        self._check_open()
        documents = find_documents(rows)
        if documents is not None and not documents.lengths:
            raise ValueError("attention_mask marks no token at all")
        size = stated(getattr(self.model, "config", None), "vocab_size")
        if size is not None and rows.input_ids.device.type == "cpu":  # avoid a synchronization
            check_token_ids(rows.input_ids, size)
        device = self._device()
        mapping = self._vocab_mapping(device) if self.supervision == "probs" else None
        with on_device(device):
            if self._rank_groups is None:
                device_rows = rows.to(device)
                batch = self._run_rows(device_rows, self._passes(device_rows, documents))
            else:
                batch = cast(Eagle3TargetBatch, self._run_with_ranks(rows, self._rank_groups))
            if mapping is not None:
                head = None if self._answers_logits else self._head_of_states()
                batch = batch.with_probs(head, *mapping)
            return batch

    @torch.no_grad()
    def join(self) -> None:
        self._check_open()
        if self._rank_groups is not None:
            with on_device(self._device()):
                self._run_with_ranks(None, self._rank_groups)

    def _run_with_ranks(
        self, rows: TokenBatch | None, ranks: RankGroups
    ) -> Eagle3TargetBatch | None:
        """Run the rows of every rank, in the same order on all ranks; only the answer about this
        rank's own rows is kept."""
        device = self._device()
        questions, own_index = ranks.exchange(rows)
        moved = [question.to(device) for question in questions]
        passes = list(map(self._passes, moved, map(find_documents, questions)))
        count = sum(map(len, passes))
        idle = ranks.most(count) - count
        own_batch = None
        for index, batch in enumerate(map(self._run_rows, moved, passes)):
            own_batch = batch if index == own_index else own_batch
        dummy_11 = torch.zeros((1, 1), dtype=torch.long, device=device)
        for _ in range(idle):
            aux = AuxBuffer(dummy_11.shape, self.aux_layer_ids)
            self._forward(dummy_11, torch.ones_like(dummy_11), aux, None)
        return own_batch

    def _passes(self, rows: TokenBatch, documents: Documents | None) -> Sequence[Group | None]:
        """The forward passes that rows take: one (None) for padded rows, else one per group of
        documents."""
        return [None] if documents is None else self._groups(documents, rows.input_ids)

    def _run_rows(self, rows: TokenBatch, passes: Sequence[Group | None]) -> Eagle3TargetBatch:
        aux = AuxBuffer(rows.input_ids.shape, self.aux_layer_ids)
        answer_BTX: Tensor | None = None
        for group in passes:
            if group is None:
                answer_BTX = self._forward(rows.input_ids, rows.attention_mask, aux, None)
                self._keep_last(answer_BTX, aux, None)
                continue
            ids_NL = group.take(rows.input_ids)
            answer_NLX = self._forward(ids_NL, group.attention_mask_NL, aux, group)
            self._keep_last(answer_NLX, aux, group)
            if answer_BTX is None:
                answer_BTX = answer_NLX.new_zeros((*rows.shape, answer_NLX.shape[-1]))
            group.put(answer_NLX, answer_BTX)
        self._check_captured(aux.captured)
        return Eagle3TargetBatch.about(
            rows,
            aux_hidden_states=aux.result(),
            logits=answer_BTX if self._answers_logits else None,
            last_hidden_states=None if self._answers_logits else answer_BTX,
        )

    def _keep_last(self, answer: Tensor, aux: AuxBuffer, group: Group | None) -> None:
        """Copy the answer to `aux` if the last hidden state is one of the aux layers."""
        if self._depth in self.aux_layer_ids:
            aux.write(self._depth, answer, group)

    @property
    def _inner_layers(self) -> list[int]:
        return inner_layers(self.aux_layer_ids, self._depth)

    def _check_last_state(self) -> None:
        """Reject the last hidden state as an aux layer where the answer is logits: the state in
        front of the head is then not available."""
        if self._depth in self.aux_layer_ids and self._answers_logits:
            what = f"aux layer {self._depth} is the last hidden state, which is not there with "
            raise BadInput(f"{what}{self.supervision} supervision", fix="use hidden supervision")

    def _plan(self, documents: Documents, ids_BT: Tensor) -> list[list[int]]:
        """Which documents run in one pass, as its rows; no pass is larger than the batch itself."""
        return plan_groups(
            documents.lengths, overhead_tokens=self.overhead_tokens, max_tokens=ids_BT.numel()
        )

    def _groups(self, documents: Documents, ids_BT: Tensor) -> Sequence[Group]:
        """The groups in which the documents of a packed batch are run."""
        return group_documents(documents, self._plan(documents, ids_BT), device=ids_BT.device)

    def _check_captured(self, captured: dict[int, Tensor]) -> None:
        if missing := [i for i in self.aux_layer_ids if i not in captured]:
            raise RuntimeError(
                f"the target's forward returned nothing for decoder layers {missing} of "
                f"{self.aux_layer_ids}"
            )
