"""Passes of a model in this process: its own forward, with the states of some layers captured.

Decoder layers' outputs are copied into the returned tensor as they are computed. A pass may end
after the last of these layers, may be shared by ranks along its rows, and on a GPU may run compiled
layers or be replayed as a CUDA graph.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.graphs import RecordedSizes
from fledge.target.capture import AuxBuffer, hidden_of, layer_outputs, muted_head, stop_behind
from fledge.target.hf.compiled import CompiledLayers, compile_errors
from fledge.target.hf.context import share_of, shared_rows
from fledge.target.hf.one_row import (
    OneRow,
    WholeRow,
    caps_scores,
    causal_rows,
    documents_apart,
)
from fledge.target.inprocess import InProcessTarget
from fledge.target.packing import Group

StatesOf = Callable[[int, Tensor], None]  # (layer id, its output)


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
    _recorded_features: RecordedSizes[list[Tensor]]  # of passes that end after the last aux layer
    _stop: bool  # whether passes end after the last aux layer

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """While open, passes end after the last aux layer."""
        self._stop = True
        try:
            yield
        finally:
            self._stop = False

    def _forward(self, ids: Tensor, mask: Tensor, aux: AuxBuffer, group: Group | None) -> Tensor:
        if self.model.training:  # the caller may have called train() on the shared module
            self.model.eval()
        write = partial(aux.write, group=group)
        if self._cp_size > 1:
            return self._run_share(ids, mask if group is None else None, write)
        # only a pass over the whole batch has the same shape every time and is worth compiling
        if isinstance(group, OneRow) or ids.numel() != aux.rows_BT.numel():
            return self._run(ids, mask, group, write)
        try:
            with self._compiled.lent():
                if isinstance(group, WholeRow) and self._worth_recording(ids.numel()):
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
            if isinstance(group, OneRow | WholeRow):
                stack.enter_context(documents_apart(self.model, group))
                return self._captured(write, ids, None, **group.options())
            # documents need no mask, and without one the causal kernels are faster
            if group is not None and self.skip_masks:
                stack.enter_context(causal_rows(self.model))
            return self._captured(write, ids, mask if group is None else None)

    def _run_share(self, ids_NL: Tensor, mask_NL: Tensor | None, write: StatesOf) -> Tensor:
        """`_run` for rows that the ranks of `cp_mesh` share: each rank runs some of their slots,
        and every rank gets the states of all slots."""
        share = share_of(self.cp_mesh, ids_NL.shape[1], mask_NL, caps=caps_scores(self.model))
        positions_NL = torch.arange(ids_NL.shape[1], device=ids_NL.device).expand_as(ids_NL)
        with shared_rows(self.model, share):
            answer_NQX = self._captured(
                lambda layer_id, states_NQD: write(layer_id, share.whole(states_NQD)),
                share.take(ids_NL),
                None,
                position_ids=share.take(positions_NL),
            )
        return share.whole(answer_NQX)

    def _captured(self, write: StatesOf, *arguments: Any, **options: Any) -> Tensor:
        """`_call` with the aux layers' states passed to `write`; returns logits or, if the head is
        not run, its input."""
        head_inputs: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            head_inputs.append(hidden)
            return hidden

        with ExitStack() as stack:
            if self._stop:
                write = stack.enter_context(stop_behind(max(self._inner_layers), write, keep))
            stack.enter_context(layer_outputs(self._layers, self._inner_layers, write))
            if self.supervision != "logits":
                assert self._head_module is not None
                stack.enter_context(muted_head(self._head_module, keep))
            logits = self._call(*arguments, **options)
        return logits if self.supervision == "logits" else head_inputs[0]

    def _worth_recording(self, slots: int) -> bool:
        """Whether kernel launches take longer than running such a pass on the GPU, and its size
        recurs."""
        short = self.record_passes and slots < 2 * self.overhead_tokens
        return short and self._recordings.worth_it(slots)

    @property
    def _recordings(self) -> RecordedSizes[list[Tensor]]:
        return self._recorded_features if self._stop else self._recorded

    def _replay(self, ids: Tensor, group: WholeRow, write: StatesOf) -> Tensor:
        def run(ids: Tensor, **options: Tensor) -> list[Tensor]:
            states: dict[int, Tensor] = {}
            answer = self._run(ids, None, group.with_options(options), states.__setitem__)
            return [*(states[i] for i in self._inner_layers), answer]

        *states, answer = self._recordings(ids.numel(), run, {"ids": ids, **group.options()})
        for layer_id, layer_states in zip(self._inner_layers, states, strict=True):
            write(layer_id, layer_states)
        return answer

    def _call(self, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Call the model's own forward and return its logits, however they are wrapped."""
        output = self.model(input_ids=ids, attention_mask=mask, **self._options, **options)
        logits = getattr(output, "logits", None)
        return logits if isinstance(logits, Tensor) else hidden_of(output)
