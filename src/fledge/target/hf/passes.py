"""Passes of a model in this process: its own forward, with the states of some layers captured.

Decoder layers' outputs are copied into the returned tensor as they are computed. A pass may be
shared by ranks along its rows, and on a GPU may run compiled layers or be replayed as a CUDA graph.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fledge.core.errors import first_line
from fledge.core.graphs import RecordedSizes
from fledge.target.hf.one_row import (
    Unsupported,
    WholeRow,
    causal_rows,
    documents_apart,
    whole_row,
)
from fledge.target.hf.parallel import rank_slots, shared_rows
from fledge.target.inprocess import InProcessTarget
from fledge.target.layers import AuxBuffer, hidden_of, layer_outputs, muted_head
from fledge.target.packing import Documents, Group

if TYPE_CHECKING:
    from fledge.target.hf.model import HFEagle3TargetModel


log = logging.getLogger(__name__)
StatesOf = Callable[[int, Tensor], None]  # (layer id, its output)


class CompiledLayers:
    """Compiled forwards of some layers, installed only while a pass runs. (Small models are limited
    by kernel launches instead: see `core/graphs.py`.)"""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._forwards: list[tuple[nn.Module, Any]] = [
            (layer, torch.compile(layer.forward))
            for layer in layers
            if "forward" not in layer.__dict__  # offloading tools store their own forward there
        ]
        self._needs_collection = bool(self._forwards)

    @contextmanager
    def lent(self) -> Iterator[None]:
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.forward
        if self._needs_collection:  # compiling leaves reference cycles that hold this pass' tensors
            self._needs_collection = False
            gc.collect()

    def give_up(self, error: BaseException) -> None:
        reason = first_line(error)
        log.warning("the target's layers run uncompiled: compilation failed (%s)", reason)
        self._forwards = []


def compile_errors() -> tuple[type[BaseException], ...]:
    """The exceptions that torch raises when compilation fails."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


class ModelPasses(InProcessTarget):
    """A target that is a torch module; its constructor is the subclass's."""

    model: nn.Module
    cp_mesh: Any  # the ranks that share rows
    skip_masks: bool  # whether documents run without a mask
    record_passes: bool
    _cp_size: int
    _layers: list[nn.Module]
    _options: dict[str, Any]  # of every call of the model
    _head_module: nn.Module | None
    _compiled: CompiledLayers
    _recorded: RecordedSizes[list[Tensor]]

    def _forward(self, ids: Tensor, mask: Tensor, aux: AuxBuffer, group: Group | None) -> Tensor:
        if self.model.training:  # the caller may have called train() on the shared module
            self.model.eval()
        write = partial(aux.write, group=group)
        if self._cp_size > 1:
            return self._run_slots(ids, mask if group is None else None, write)
        # only a pass over the whole batch has the same shape every time and is worth compiling
        if ids.numel() != aux.rows_BT.numel():
            return self._run(ids, mask, group, write)
        try:
            with self._compiled.lent():
                # where launching kernels takes longer than running them, and the size recurs
                short = self.record_passes and ids.numel() < 2 * self.overhead_tokens
                if isinstance(group, WholeRow) and short and self._recorded.worth_it(ids.numel()):
                    return self._replay(ids, group, write)
                return self._run(ids, mask, group, write)
        except compile_errors() as error:
            self._compiled.give_up(error)
            return self._run(ids, mask, group, write)

    def _run(
        self, ids: Tensor, mask: Tensor | None, group: Group | None, write: StatesOf
    ) -> Tensor:
        """Run the model's own forward: `write` gets the aux layers' states, the answer is
        returned."""
        with ExitStack() as stack:
            if isinstance(group, WholeRow):
                stack.enter_context(documents_apart(self.model))
                return self._captured(write, ids, None, **group.options())
            # documents need no mask, and without one the causal kernels are faster
            if group is not None and self.skip_masks:
                stack.enter_context(causal_rows(self.model))
            return self._captured(write, ids, mask if group is None else None)

    def _run_slots(self, ids_NL: Tensor, mask_NL: Tensor | None, write: StatesOf) -> Tensor:
        """`_run` for rows that the ranks of `cp_mesh` share: each rank runs some of their slots,
        and every rank gets the states of all slots."""
        own = rank_slots(self.cp_mesh, ids_NL.shape[1], mask_NL)
        positions_NL = torch.arange(ids_NL.shape[1], device=ids_NL.device).expand_as(ids_NL)
        with shared_rows(self.model, own):
            answer_NQX = self._captured(
                lambda layer_id, states_NQD: write(layer_id, own.whole(states_NQD)),
                own.take(ids_NL),
                None,
                position_ids=own.take(positions_NL),
            )
        return own.whole(answer_NQX)

    def _captured(self, write: StatesOf, *arguments: Any, **options: Any) -> Tensor:
        """`_call` with the aux layers' states passed to `write`; returns logits or, if the head is
        not run, its input."""
        head_inputs: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            head_inputs.append(hidden_of(hidden))
            return hidden

        with ExitStack() as stack:
            stack.enter_context(layer_outputs(self._layers, self._inner_layers, write))
            if self.supervision != "logits":
                assert self._head_module is not None
                stack.enter_context(muted_head(self._head_module, keep))
            logits = self._call(*arguments, **options)
        return logits if self.supervision == "logits" else head_inputs[0]

    def _replay(self, ids: Tensor, group: WholeRow, write: StatesOf) -> Tensor:
        def run(ids: Tensor, **options: Tensor) -> list[Tensor]:
            states: dict[int, Tensor] = {}
            answer = self._run(ids, None, group.with_options(options), states.__setitem__)
            return [*(states[i] for i in self._inner_layers), answer]

        *states, answer = self._recorded(ids.numel(), run, {"ids": ids, **group.options()})
        for layer_id, layer_states in zip(self._inner_layers, states, strict=True):
            write(layer_id, layer_states)
        return answer

    def _call(self, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Call the model's own forward and return its logits, however they are wrapped. Where ranks
        hold a part of them each (a caller's tensor parallelism), they are gathered."""
        output = self.model(input_ids=ids, attention_mask=mask, **self._options, **options)
        logits = getattr(output, "logits", None)
        return hidden_of(logits if isinstance(logits, Tensor) else output)


# --- numerical checks that two ways of running a model give the same states, whatever its class ---

Way = Callable[[Tensor, AuxBuffer], None]  # runs ids [B, T] and fills the buffer
# Raised by architectures that cannot run one of the ways (TypeError: a forward that accepts no
# further arguments).
_REFUSALS = (Unsupported, TypeError, ValueError, RuntimeError, LookupError, AttributeError)


def fill_alike(one: Way, other: Way, aux_layer_ids: Sequence[int], device: torch.device) -> bool:
    """Whether both ways run twelve tokens and give the same aux states up to rounding."""
    ids_BT = torch.arange(12, device=device)[None]
    answers = []
    try:
        for way in (one, other):
            aux = AuxBuffer(ids_BT.shape, aux_layer_ids)
            way(ids_BT, aux)
            answers.append(aux.result().double())
    except _REFUSALS:
        return False
    error = (answers[0] - answers[1]).abs().mean() / answers[0].abs().mean()
    return bool(error < (1e-4 if aux.result().dtype in (torch.float32, torch.float64) else 3e-2))


def one_row_is_exact(target: "HFEagle3TargetModel") -> bool:
    """Whether two small documents give the same states in one row as they do alone."""
    documents = Documents((0, 7), (7, 5))

    def as_rows(ids_BT: Tensor, aux: AuxBuffer) -> None:
        for group in InProcessTarget._groups(target, documents, ids_BT):
            _fill(target, group, ids_BT, aux)

    def in_one_row(ids_BT: Tensor, aux: AuxBuffer) -> None:
        group = whole_row(documents, ids_BT.numel(), device=ids_BT.device)
        _fill(target, group, ids_BT, aux)

    return fill_alike(as_rows, in_one_row, target.aux_layer_ids, target._device())


def sharing_is_exact(target: "HFEagle3TargetModel") -> bool:
    """Whether a small row gives the same states shared by ranks as on one rank."""

    def shared(ids_BT: Tensor, aux: AuxBuffer) -> None:
        answer = target._run_slots(ids_BT, None, partial(aux.write, group=None))
        target._keep_last(answer, aux, None)

    alone = partial(_fill, target, None)
    return fill_alike(alone, shared, target.aux_layer_ids, target._device())


def _fill(
    target: "HFEagle3TargetModel", group: Group | None, ids_BT: Tensor, aux: AuxBuffer
) -> None:
    ids_NL = ids_BT if group is None else group.take(ids_BT)
    answer = target._run(ids_NL, None, group, partial(aux.write, group=group))
    target._keep_last(answer, aux, group)
