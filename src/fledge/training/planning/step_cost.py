"""What one step costs: the real step, run on the meta device, where tensors have no memory.

Rows are laid out on the host as in training. Torch counts the operations of matrix products (a
multiply-add is two), and the sizes of all tensors that are alive at the same time add up to the
memory. What GPU kernels do differently is in `rms_norm` and `rollout/attention.py`. What a draft
keeps between steps is exact (`DraftMemory`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import first_line
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch, TokenRow
from fledge.data.pack import Piece, collate
from fledge.methods.base import Method, TrainerInputs
from fledge.methods.shared.draft import DraftModel
from fledge.training.optimizer import trained_by_muon

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.recipe.schema import Recipe
    from fledge.recipe.sections import Training as TrainingSection

log = logging.getLogger(__name__)

USABLE = 0.92  # share of a GPU's memory; the rest is its context, libraries and fragmentation
SUPERVISED = 0.8  # a typical share of the tokens
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
    """A training step on the meta device. An objective of somebody else's method may need values,
    which tensors do not have there; then complete rollouts are counted roughly."""

    def __init__(
        self,
        method: Method,
        draft: DraftModel,
        options: Mapping[str, Any],  # of the objective
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = draft.config
        vocab, drafted = config.vocab_size, config.draft_vocab_size
        self._hidden, self._aux = config.target_hidden_size, config.num_aux_hidden_states
        self._draft, self.dtype = draft, dtype
        head = TargetHead(self._states(vocab, self._hidden))
        ids, member = torch.arange(drafted), torch.arange(vocab) < drafted
        given = TrainerInputs(ids, member, head, dtype)
        self._objective = method.objective(draft, given, **options)

    def _states(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=_META)

    def answer_bytes(self, tokens: int) -> int:
        """The size of the target's answer."""
        return int(tokens * (self._aux + 1) * self._hidden * self.dtype.itemsize)

    def key_bytes(self, tokens: int) -> int:
        """The size of the keys and values of this many tokens in all layers."""
        config = self._draft.config
        per_layer = 2 * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
        return int(tokens * per_layer * config.num_hidden_layers)

    def training(self, rows: TokenBatch, seed: int = 0) -> StepCost:
        """Forward and backward of the draft and the target's head, on one rank."""
        self._draft.train()
        weights = list(self._draft.parameters())
        for weight in weights:
            weight.grad = None
        try:
            with _counter() as counter:
                ready = self._objective.prepare(rows, self._answer(rows), seed)
                with _Peak(weights) as peak:
                    loss = self._objective.score(ready, ready.charged_K).loss
                    loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # it needs values: count complete rollouts, roughly
            log.warning("the step is counted roughly, as it needs values: %s", first_line(error))
            slots = rows.input_ids.numel() * self._objective.depths
            layers = self._draft.config.num_hidden_layers
            kept_bytes = slots * self.dtype.itemsize * 16 * self._hidden * layers
            return StepCost(6.0 * slots * sum(map(Tensor.numel, weights)), kept_bytes)
        return StepCost(counter.get_total_flops(), peak.bytes)

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


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftMemory:
    """A draft's parameters, and what is kept beside them between steps."""

    trained: int  # parameters
    frozen: int
    kept: int  # bytes of AdamW's two moments or Muon's one

    @classmethod
    def of(cls, draft: nn.Module, training: "TrainingSection") -> "DraftMemory":
        trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
        muon = trained_by_muon(draft).values() if training.optimizer == "muon" else ()
        kept = 8 * trained - 4 * sum(p.numel() for p in muon)
        return cls(trained, sum(p.numel() for p in draft.parameters()) - trained, kept)

    @property
    def saved_bytes(self) -> int:
        """The size of a checkpoint."""
        return 4 * (self.trained + self.frozen) + self.kept

    def bytes(self, *, shard: int = 1, width: int = 4) -> int:
        """Bytes of weights, gradients, and what is kept. During a step, sharded ranks also hold the
        whole weights, in the dtype of the step, and the whole gradients."""
        if shard == 1:
            return 8 * self.trained + self.kept + 4 * self.frozen
        whole = (width + 4) * self.trained + 4 * self.frozen
        return (4 * self.trained + self.kept) // shard + whole


@dataclass(frozen=True)
class StepMemory:
    """What one step needs on top: what the draft keeps, and the target's answers."""

    step: MetaStep
    rows: TokenBatch  # a micro-batch
    cost: StepCost  # of a step on it
    accumulate: int
    splits_rows: bool  # several ranks can share the rows

    @classmethod
    def of(
        cls,
        draft: DraftModel,  # on the meta device
        batches: Sequence[TokenBatch],
        recipe: "Recipe",
        dtype: torch.dtype = torch.bfloat16,
    ) -> "StepMemory":
        """From micro-batches, of which the largest counts."""
        step = MetaStep(recipe.method, draft, recipe.objective.options(), dtype)
        costs = zip(map(step.training, batches), batches, strict=True)
        cost, rows = max(costs, key=lambda pair: pair[0].bytes)
        return cls(step, rows, cost, recipe.training.accumulate, recipe.method.splits_rows)

    def bytes(self, context: int = 1) -> int:
        """Bytes on one rank, if `context` ranks share their rows. Two copies of an answer exist
        while it is made; of the target's states and its own activations, a rank keeps its part,
        but depth-0 keys and values of all tokens."""
        answer = self.step.answer_bytes(self.rows.tokens)
        if context == 1 or not self.splits_rows:
            return int(self.cost.bytes + 2 * answer * self.accumulate)
        rows, (count, width) = self.rows, self.rows.shape
        document = width if rows.seq_lens is None else int(rows.seq_lens.max())
        supervised = float(rows.loss_mask.sum() / rows.attention_mask.sum())
        part = typical_rows(count, -(-width // context), document=document, supervised=supervised)
        kept = self.step.training(part).bytes + self.step.key_bytes(rows.tokens - part.tokens)
        return int(kept + 2 * answer + answer * self.accumulate / context)

    def context_needed(self, free_bytes: float) -> int | None:
        """The smallest power of two of ranks over which a step fits; None if 64 are too few."""
        sizes = (2**power for power in range(7))
        return next((size for size in sizes if self.bytes(size) <= free_bytes), None)


def typical_rows(
    rows: int, tokens: int, *, document: int, supervised: float = SUPERVISED
) -> TokenBatch:
    """`rows` packs of `tokens` tokens, with documents of this length that end in an answer."""
    lengths = np.diff([*range(0, tokens, document), tokens]).tolist()
    documents = []
    for length in lengths:
        answer = np.arange(length) >= round(length * (1 - supervised))
        ids = np.zeros(length, np.int32)
        documents.append(TokenRow(ids, answer.astype(np.uint8), "", truncated=False))
    pack = tuple(Piece(row, length) for row, length in enumerate(lengths))
    return collate(documents, [pack] * rows, tokens, pad_id=0)
