"""AdamW and Muon on float32 masters, the learning-rate schedule, and the guard against bad steps.

Nothing here waits for the device: whether a step is bad is decided there, and a bad step is skipped
there.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fledge.kernels.gate import kernel_runs
from fledge.train.muon import SkippingMuon
from fledge.train.sharding import whole_tensor

if TYPE_CHECKING:
    from fledge.recipe.sections import Training

GUARD_WINDOW = 64  # gradient norms remembered
GUARD_WARMUP = 16  # norms needed before one can be called a spike

_LARGE = 2**20  # numbers of a tensor that is worth a kernel's launch


class SkippingAdamW(torch.optim.AdamW):
    """torch's AdamW, with names for what its fused kernel takes from whoever scales gradients. On a
    GPU large tensors are updated by a kernel of our own."""

    found_inf: Tensor | None = None  # above 0: the step is skipped
    grad_scale: Tensor | None = None  # what gradients are divided by

    def _accelerator_graph_capture_health_check(self) -> None:
        """Torch would want `capturable`, which is for kernels that are not fused: what this step
        counts is on the device, and so is the learning rate of whoever records it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "gradients are there before the step"
        updated = [p for group in self.param_groups for p in self._update_large(group)]
        grads = [p.grad for p in updated]
        for p in updated:
            p.grad = None  # so that torch passes it by
        super().step()
        for p, grad in zip(updated, grads, strict=True):
            p.grad = grad

    def _update_large(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """Updates what our kernel can, and says what that was. The first step of a tensor is left
        to torch, which makes its state."""
        large = [p for p in group["params"] if self.state.get(p) and _is_large(p, self.state[p])]
        if large:
            from fledge.kernels.adamw import adamw

            states = [self.state[p] for p in large]
            adamw(
                large,
                [p.grad for p in large],
                *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")),
                **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
        return large


def _is_large(p: nn.Parameter, state: dict[str, Tensor]) -> bool:
    """Whether our kernel updates it. Small ones are faster all at once; shares of a tensor that
    ranks hold together are torch's business."""
    if p.grad is None or p.numel() < _LARGE or isinstance(p, DTensor):
        return False
    held = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
    return all(tensor.is_contiguous() for tensor in held) and kernel_runs(p, what="AdamW")


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> SkippingAdamW:
    """Fused AdamW; weight decay on matrices only (norms and placeholders are left alone)."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]
    return SkippingAdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True
    )


Skipping = SkippingAdamW | SkippingMuon


def make_optimizers(draft: nn.Module, training: "Training") -> tuple[Skipping, ...]:
    """What updates the trained parameters: AdamW, and Muon for matrices where a recipe says so.

    Muon's steps are scaled to the size of AdamW's, so one learning rate and one weight decay do for
    both.
    """
    both: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    muon = trained_by_muon(draft) if training.optimizer == "muon" else {}
    rest = [p for name, p in draft.named_parameters() if p.requires_grad and name not in muon]
    return (
        make_optimizer(rest, betas=training.betas, eps=training.eps, **both),
        *([SkippingMuon(muon.values(), **both)] if muon else []),
    )


def trained_by_muon(draft: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices that lead from hidden states to hidden states: of the layers, and fc. Embeddings
    and heads, whose rows are tokens, are not among them."""
    return {
        name: parameter
        for name, parameter in draft.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and name.startswith(("layers.", "fc."))
    }


def state_like(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter: names, shapes and dtypes."""
    if isinstance(optimizer, SkippingMuon):
        return {"momentum_buffer": parameter}
    return {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def clip_gradients(
    optimizers: Sequence[Skipping],
    parameters: Sequence[nn.Parameter],
    limit: float | None,
) -> Tensor:
    """The norm of all gradients, which the next step limits. On a GPU AdamW scales them while it
    updates, and need not read and write all of them once more for that."""
    limit = math.inf if limit is None else limit
    norm = whole_tensor(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    over = (norm + 1e-6) / limit  # as torch.nn.utils.clip_grads_with_norm_ has it
    for optimizer in optimizers:
        if norm.is_cuda and isinstance(optimizer, SkippingAdamW):
            optimizer.grad_scale = over.clamp_min(1.0).float()
        else:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grads_with_norm_(own, limit, norm)
    return norm


def learning_rate(
    step: int,
    total: int,
    *,
    peak: float,
    warmup: int,
    schedule: str,
    final_share: float,
    decay_share: float = 0.2,
) -> float:
    """Linear warm-up to `peak`, then down to `final_share` of it: along a cosine or a line, or not
    at all (constant); or, wsd, only over the last `decay_share` of all steps, as 1 - sqrt does."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    begin = max(warmup, total - math.ceil(decay_share * total)) if schedule == "wsd" else warmup
    done = max(0, step - begin) / max(1, total - begin)
    falls = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "wsd": 1 - math.sqrt(done),
    }
    return peak * (final_share + (1 - final_share) * falls[schedule])


class StepGuard:
    """Judges steps by their gradient norm: not finite, or far above the recent median, is bad. So
    is a step whose target's answer was not finite, whatever its gradient."""

    def __init__(self, spike_factor: float | None, device: torch.device) -> None:
        self._factor = math.inf if spike_factor is None else spike_factor
        self.norms = torch.full((GUARD_WINDOW,), math.nan, device=device)  # a ring
        self.good = torch.zeros((), dtype=torch.int64, device=device)  # steps taken
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, norm: Tensor, broken: Tensor | None = None) -> Tensor:
        """True (on the device) for a bad step; good norms are remembered."""
        spike = (self.good >= GUARD_WARMUP) & (norm > self._factor * self._median())
        bad = ~torch.isfinite(norm) | spike
        if broken is not None:
            bad = bad | broken
        slot = (self.good % GUARD_WINDOW).reshape(1)
        kept = torch.where(bad, self.norms.index_select(0, slot), norm.to(self.norms.dtype))
        self.norms.index_copy_(0, slot, kept)
        self.good += ~bad
        self.bad_in_a_row.copy_(torch.where(bad, self.bad_in_a_row + 1, 0))
        return bad

    def _median(self) -> Tensor:
        """`norms.nanmedian()`, which on a GPU would wait for it."""
        middle = (self.norms.isnan().logical_not().sum() - 1).clamp_min(0) // 2
        ordered = self.norms.sort().values  # NaN come last
        return ordered.index_select(0, middle.reshape(1)).squeeze(0)

    def state(self) -> dict[str, Tensor]:
        return {"norms": self.norms, "good": self.good, "bad_in_a_row": self.bad_in_a_row}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
