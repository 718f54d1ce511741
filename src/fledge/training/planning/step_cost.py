"""What one step costs: the real step, run on the meta device, where tensors have no memory.

Rows are laid out on the host as in training. Torch counts the operations of matrix products (a
multiply-add is two), and the sizes of all tensors that are alive at the same time add up to the
memory. What GPU kernels do differently is in `rms_norm` and `rollout/attention.py`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import first_line
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.decode.strategy import rollouts_of
from fledge.methods.base import Method, TrainerInputs
from fledge.methods.shared.draft import DraftModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_META = torch.device("meta")
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


@dataclass(frozen=True)
class StepCost:
    operations: float
    bytes: float  # at the peak, without the gradients of weights


def without_memory(
    method: Method, config: "PretrainedConfig", like: DraftModel | None = None
) -> DraftModel:
    """A draft on the meta device; it trains the same weights as `like`."""
    with torch.device(_META):
        draft = method.draft_type()(config)
    if like is not None:
        draft.gradient_checkpointing = like.gradient_checkpointing
        for weight, original in zip(draft.parameters(), like.parameters(), strict=True):
            weight.requires_grad_(original.requires_grad)
    return draft


class MetaStep:
    """Training and evaluation of a draft on the meta device. An objective of somebody else's method
    may need values, which tensors do not have there; then complete rollouts are counted roughly."""

    def __init__(
        self,
        method: Method,
        draft: DraftModel,
        options: Mapping[str, Any],  # of the objective
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = draft.config
        vocab, self._drafted = config.vocab_size, config.draft_vocab_size
        self._hidden, self._aux = config.target_hidden_size, config.num_aux_hidden_states
        self._draft, self._dtype, self._warned = draft, dtype, False
        head = TargetHead(self._states(vocab, self._hidden))
        ids, member = torch.arange(self._drafted), torch.arange(vocab) < self._drafted
        given = TrainerInputs(ids, member, head, dtype)
        self._objective = method.objective(draft, given, **options)

    def _states(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=_META)

    def answer_bytes(self, tokens: int) -> int:
        """The size of the target's answer."""
        return int(tokens * (self._aux + 1) * self._hidden * self._dtype.itemsize)

    def key_bytes(self, tokens: int) -> int:
        """The size of the keys and values of this many tokens in all layers."""
        config = self._draft.config
        per_layer = 2 * config.num_key_value_heads * config.head_dim * self._dtype.itemsize
        return int(tokens * per_layer * config.num_hidden_layers)

    def training(self, rows: TokenBatch, seed: int = 0) -> StepCost:
        """Forward and backward of the draft and the target's head, on one rank."""
        try:
            return self._training(rows, seed)
        except RuntimeError as error:
            self._warn(error)
            slots = rows.input_ids.numel() * self._objective.depths
            kept_bytes = slots * self._dtype.itemsize * 16 * self._hidden  # per layer, about
            layers = self._draft.config.num_hidden_layers
            return StepCost(3 * self._forward_operations(slots), kept_bytes * layers)

    def _forward_operations(self, slots: int) -> float:
        return 2.0 * slots * sum(weight.numel() for weight in self._draft.parameters())

    def _warn(self, error: RuntimeError) -> None:
        if not self._warned:
            log.warning("the step is counted roughly, as it needs values: %s", first_line(error))
        self._warned = True

    def _training(self, rows: TokenBatch, seed: int) -> StepCost:
        self._draft.train()
        weights = list(self._draft.parameters())
        for weight in weights:
            weight.grad = None
        with _counter() as counter:
            ready = self._objective.prepare(rows, self._answer(rows), seed)
            with _Peak(weights) as peak:
                loss = self._objective.score(ready, ready.charged_K).loss
                loss.backward()  # type: ignore[no-untyped-call]
        return StepCost(counter.get_total_flops(), peak.bytes)

    @torch.no_grad()
    def evaluation(self, rows: TokenBatch) -> float:
        """Operations of scoring held-out rows and then replaying them."""
        try:
            return self._evaluation(rows)
        except RuntimeError as error:
            self._warn(error)
            return 2 * self._forward_operations(rows.input_ids.numel() * self._objective.depths)

    def _evaluation(self, rows: TokenBatch) -> float:
        self._draft.eval()
        answer, depths = self._answer(rows), self._objective.depths
        with _counter() as counter:
            ready = self._objective.prepare(rows, answer, seed=0)
            self._objective.score(ready, ready.charged_K)
            rollouts = rollouts_of(self._draft, depths, dtype=self._dtype)
            rollouts.head_inputs(answer, rollouts.plan(rows))
        return float(counter.get_total_flops())

    def _answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        aux_BTD = self._states(*rows.shape, self._aux * self._hidden)
        last_BTD = self._states(*rows.shape, self._hidden)
        return Eagle3TargetBatch.about(
            rows, aux_hidden_states=aux_BTD, last_hidden_states=last_BTD, shifted=True
        )


def _counter() -> FlopCounterMode:
    """Torch counts `addmm`, but not its in-place form."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product})


def _product(into: Any, left: Any, right: Any, **_: Any) -> int:
    return 2 * int(left[0] * left[1] * right[1])


class _Peak(TorchDispatchMode):
    """The most bytes, at any product, of the tensors that were made while it was open, without the
    gradients of `weights`."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._weights = weights
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        self._given |= given - self._made.keys()
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._given:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[storage._cdata] = (reference, storage.nbytes())
        if func._overloadpacket in _PRODUCTS:
            self._made = {at: kept for at, kept in self._made.items() if not kept[0].expired()}  # type: ignore[no-untyped-call]
            grads = (weight.grad for weight in self._weights if weight.grad is not None)
            live = sum(size for _, size in self._made.values()) - sum(grad.nbytes for grad in grads)
            self.bytes = max(self.bytes, live)
        return result


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_meta)
    return (leaf.untyped_storage() for leaf in leaves)
