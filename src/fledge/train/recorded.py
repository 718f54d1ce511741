"""The passes and the update of a step as CUDA graphs, for drafts that leave a GPU idle.

A step of a small draft is a thousand small launches, and the GPU waits for Python most of the time.
What is launched depends on the sizes of a rollout alone, and those are rounded up
(`rollout/even.py`, `even_blocks.py`, `even_parallel.py`). So the passes of a size that comes back
are recorded, from the target's answer to the gradients, and started with one call. So is the
update, which is the same every time: clipping, the verdict, AdamW, Muon, the average.

One micro-batch on one rank, whose own count is the step's. The numbers are those of `train_step`'s
other way, which tests compare.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import PACKING_FIELDS
from fledge.objective.base import RolloutOutput
from fledge.rollout.plan import RolloutPlan
from fledge.target.hf import compiled
from fledge.target.hf.compiled import RecordedPass, RecordedSizes

_WIDEST = 1024  # hidden size: larger drafts keep a GPU busy
_ALONE = 2  # updates before one is recorded: optimizers make their states, kernels are chosen
_SIZES = 16  # rows a step may have are so many: some are padding, and each is recorded


def recorded_steps(
    objective: Any, parameters: Sequence[nn.Parameter], *, tokens: int
) -> "RecordedSteps | None":
    """Recorded steps of micro-batches of so many tokens; None: it does not pay, or cannot be."""
    draft = objective.draft_model
    small = draft.config.hidden_size <= _WIDEST and not draft.gradient_checkpointing
    if draft.device.type != "cuda" or not small or not getattr(objective, "can_be_even", False):
        return None
    objective.quantum = objective.quantum_for(tokens, sizes=_SIZES)
    return RecordedSteps(objective, parameters)


class RecordedSteps:
    """Of an objective whose plans are even (`quantum`)."""

    def __init__(self, objective: Any, parameters: Sequence[nn.Parameter]) -> None:
        self._objective, self._parameters = objective, parameters
        # of all sizes in one place: those of a pass would be kept as long as it is
        self._grads: list[Tensor | None] = []
        self._sizes = RecordedSizes[RolloutOutput](_SIZES, sharing=True)
        self._updates = 0
        self._update: RecordedPass[tuple[Tensor, Tensor]] | None = None

    def __call__(self, plan: RolloutPlan, answer: Eagle3TargetBatch) -> RolloutOutput:
        """Loss and metrics; the gradients are where a backward pass leaves them. All of it lies in
        memory that the next call writes over."""

        def run(**given: Tensor) -> RolloutOutput:
            return self._passes(plan.with_tensors(given), {name: given[name] for name in names})

        told = answer.to_trainer_inputs()
        names = [name for name in told if name not in PACKING_FIELDS]  # which the plan has read
        inputs = {name: told[name] for name in names} | plan.tensors()
        size = tuple(tuple(tensor.shape) for tensor in inputs.values())
        comes_back = self._sizes.comes_back(size)
        output = self._sizes(size, run, inputs) if comes_back else run(**inputs)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return output

    def _passes(self, plan: RolloutPlan, told: dict[str, Tensor]) -> RolloutOutput:
        for parameter in self._parameters:
            parameter.grad = None
        ready = self._objective.prepare_inputs(**told, plan=plan)
        output = self._objective.score(ready, ready.charged_K)
        output.loss.backward()
        self._take_gradients()
        found = {each.name: getattr(output, each.name).detach() for each in fields(output)}
        return RolloutOutput(**found)

    def _take_gradients(self) -> None:
        found = [parameter.grad for parameter in self._parameters]
        if not self._grads:  # never while recording: the first step is not
            self._grads = [None if grad is None else torch.empty_like(grad) for grad in found]
        held, theirs = ([x for x in grads if x is not None] for grads in (self._grads, found))
        torch._foreach_copy_(held, theirs)
        for parameter in self._parameters:
            parameter.grad = None

    def update(
        self,
        run: Callable[..., tuple[Tensor, Tensor]],
        lr: float,
        broken: Tensor,
        *,
        changed: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """`run(lr, broken)`, with the rate on the device; `changed` is all that a step which is
        skipped, for it was `broken`, writes to."""
        inputs = {"lr": torch.full((), lr, device=broken.device), "broken": broken}
        self._updates += 1
        if self._updates <= _ALONE:
            return run(**inputs)
        if self._update is None:
            before = [tensor.clone() for tensor in changed]
            # it is rehearsed, and must not train the draft twice
            rehearsed = inputs | {"broken": torch.ones_like(broken)}
            self._update = compiled.RecordedPass(run, rehearsed, common=self._sizes.memory)
            torch._foreach_copy_(list(changed), before)
        norm, bad = self._update(inputs)
        return norm.clone(), bad.clone()
