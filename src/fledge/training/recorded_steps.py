"""A step's forward and backward passes and its update as CUDA graphs, for small drafts.

A step of a small draft is a thousand small kernel launches, and the GPU waits for Python most of
the time. Which kernels are launched depends only on the sizes of a rollout, and those are rounded
up (`rollout/plan.py` and those of the methods). So the passes of a recurring size are
recorded, from the target's answer to the gradients, and replayed with one call. So is the update,
which is the same every time: clipping, the verdict, AdamW, Muon.

This works for one micro-batch on one rank, whose own count is the step's. The results equal those
of the eager path in `train_step`; tests compare the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core import graphs
from fledge.core.batch import Eagle3TargetBatch
from fledge.core.graphs import RecordedPass, RecordedSizes, tensors_of, with_tensors
from fledge.core.rows import PACKING_FIELDS, TokenBatch
from fledge.methods.shared.objective import Objective, RolloutOutput
from fledge.methods.shared.rollout_objective import RolloutTrainerModule
from fledge.rollout.attention import kernel_runs
from fledge.rollout.plan import RolloutPlan

_MAX_HIDDEN_SIZE = 1024  # larger drafts keep a GPU busy without recording
_EAGER_UPDATES = 2  # before recording: optimizers create their state, kernels are selected
_SIZES = 16  # distinct rollout sizes, each recorded once; fewer would mean more padding


def recorded_steps(
    objective: Objective[Any], parameters: Sequence[nn.Parameter], *, tokens: int
) -> "RecordedSteps | None":
    """Recorded steps for micro-batches of `tokens` tokens; None where recording is impossible or
    would not pay off."""
    draft = objective.draft_model
    small = draft.config.hidden_size <= _MAX_HIDDEN_SIZE and not draft.gradient_checkpointing
    if draft.device.type != "cuda" or not small or not draft.recordable:
        return None
    if not isinstance(objective, RolloutTrainerModule) or not objective.can_be_even:
        return None
    if not _attends_on_gpu(objective):
        return None
    objective.quantum = objective.quantum_for(tokens, sizes=_SIZES)
    return RecordedSteps(objective, parameters)


def _attends_on_gpu(objective: Objective[Any]) -> bool:
    """Whether attention uses the GPU kernel: torch's path reads sizes on the host."""
    draft = objective.draft_model
    dtype = objective.compute_dtype or draft.dtype
    return kernel_runs(torch.empty(0, 1, draft.config.head_dim, dtype=dtype, device=draft.device))


class RecordedSteps:
    """Recorded steps of an objective with even plans (sizes are multiples of its `quantum`)."""

    def __init__(
        self, objective: RolloutTrainerModule[Any], parameters: Sequence[nn.Parameter]
    ) -> None:
        self._objective, self._parameters = objective, parameters
        # Shared by all sizes: otherwise every recorded pass would keep gradients of its own.
        self._grads: list[Tensor | None] = []
        self._sizes = RecordedSizes[RolloutOutput](_SIZES, sharing=True)
        self._updates = 0
        self._update: RecordedPass[tuple[Tensor, Tensor]] | None = None

    def plan(self, rows: TokenBatch, seed: int) -> RolloutPlan:
        """Lay out the rollout of a step on the host."""
        plan: RolloutPlan = self._objective.plan_rows(rows, seed)
        return plan

    def __call__(self, plan: RolloutPlan, answer: Eagle3TargetBatch) -> RolloutOutput:
        """Return loss and metrics, and leave the gradients in `parameter.grad`. The next call
        overwrites all of them."""

        def run(**given: Tensor) -> RolloutOutput:
            return self._passes(with_tensors(plan, given), {name: given[name] for name in names})

        answer_inputs = answer.to_trainer_inputs()
        # The packing fields are already part of the plan.
        names = [name for name in answer_inputs if name not in PACKING_FIELDS]
        inputs = {name: answer_inputs[name] for name in names} | tensors_of(plan)
        size = tuple(tuple(tensor.shape) for tensor in inputs.values())
        output = self._sizes(size, run, inputs) if self._sizes.worth_it(size) else run(**inputs)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return output

    def _passes(self, plan: RolloutPlan, answer_inputs: dict[str, Any]) -> RolloutOutput:
        for parameter in self._parameters:
            parameter.grad = None
        ready = self._objective.prepare_inputs(**answer_inputs, plan=plan)
        output = self._objective.score(ready, ready.charged_K)
        output.loss.backward()  # type: ignore[no-untyped-call]
        self._take_gradients()
        detached = {field.name: getattr(output, field.name).detach() for field in fields(output)}
        return RolloutOutput(**detached)

    def _take_gradients(self) -> None:
        new_grads = [parameter.grad for parameter in self._parameters]
        if not self._grads:  # never allocated while recording: the first step is not recorded
            self._grads = [None if grad is None else torch.empty_like(grad) for grad in new_grads]
        kept, new = ([x for x in grads if x is not None] for grads in (self._grads, new_grads))
        torch._foreach_copy_(kept, new)
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
        """`run(lr, broken)`, recorded, with the learning rate on the device. `changed` lists every
        tensor that `run` writes to even when the step is skipped because it is `broken`."""
        inputs = {"lr": torch.full((), lr, device=broken.device), "broken": broken}
        self._updates += 1
        if self._updates <= _EAGER_UPDATES:
            return run(**inputs)
        if self._update is None:
            before = [tensor.clone() for tensor in changed]
            # Recording starts with trial runs, which must not train the draft: they are skipped.
            trial_inputs = inputs | {"broken": torch.ones_like(broken)}
            self._update = graphs.RecordedPass(run, trial_inputs, common=self._sizes.memory)
            torch._foreach_copy_(list(changed), before)
        norm, bad = self._update(inputs)
        return norm.clone(), bad.clone()
