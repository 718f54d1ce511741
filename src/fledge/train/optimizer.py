"""AdamW on float32 masters, the learning-rate schedule, and the guard against bad steps.

Nothing here waits for the device: whether a step is bad is decided there, and a bad step is skipped
by the optimizer's own kernel.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fledge.train.sharding import whole_tensor

GUARD_WINDOW = 64  # gradient norms remembered
GUARD_WARMUP = 16  # norms needed before one can be called a spike


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices only (norms and placeholders are left alone)."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True
    )


def clip_gradients(
    optimizer: torch.optim.AdamW, parameters: Sequence[nn.Parameter], limit: float | None
) -> Tensor:
    """The norm of all gradients, which the next step limits. A GPU scales them while it updates,
    and need not read and write all of them once more for that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = whole_tensor(torch.nn.utils.get_total_norm(grads))
    limit = math.inf if limit is None else limit
    if norm.is_cuda:
        over = (norm + 1e-6) / limit  # as torch.nn.utils.clip_grads_with_norm_ has it
        optimizer.grad_scale = over.clamp_min(1.0).float()  # type: ignore[attr-defined]
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def learning_rate(
    step: int, total: int, *, peak: float, warmup: int, schedule: str, final_share: float
) -> float:
    """Linear warm-up to `peak`, then cosine, linear or constant down to `final_share` of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    done = (step - warmup) / max(1, total - warmup)
    fall = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return peak * (final_share + (1 - final_share) * fall)


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
