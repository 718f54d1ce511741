"""AdamW and Muon on float32 master weights, the learning-rate schedule, and the step guard.

Nothing here synchronizes with the device: whether a step is bad is decided there, and a bad step is
skipped there.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fledge.kernels.gate import kernel_runs
from fledge.target.weights import whole_tensor

# --- muon ----------------------------------------------------------------------------------------
# The update of `torch.optim.Muon` processes one matrix at a time with thirty kernel launches each,
# which takes longer than the whole pass of a small draft. Here, matrices of one shape (or its
# transpose) form a batch. Large ones keep a GPU busy on their own.

_BATCH = 2**24  # maximum number of elements in a batch; a larger matrix is a batch of its own


class SkippingMuon(torch.optim.Muon):
    """torch's Muon with steps scaled to the size of AdamW's, and `found_inf` to skip a step."""

    found_inf: Tensor | None = None  # above 0: the step is skipped

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(
            list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            for matrices in _batches([p for p in group["params"] if p.grad is not None]):
                self._update(matrices, group)

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        buffers = [self._momentum_buffer(matrix) for matrix in matrices]
        grad_MRC = torch.stack([_wide(matrix.grad) for matrix in matrices])
        taken = grad_MRC.new_ones(())
        if self.found_inf is not None:
            taken = (self.found_inf <= 0).to(grad_MRC.dtype)
            grad_MRC.masked_fill_(taken == 0, 0.0)  # a skipped gradient may not be finite
        momentum, lr = group["momentum"], group["lr"]
        momentum_MRC = torch.stack([_wide(buffer) for buffer in buffers])
        momentum_MRC.lerp_(grad_MRC, (1 - momentum) * taken)
        torch._foreach_copy_(list(map(_wide, buffers)), momentum_MRC.unbind())
        update_MRC = grad_MRC.lerp_(momentum_MRC, momentum) if group["nesterov"] else momentum_MRC
        direction_MRC = _orthogonal(update_MRC, group).to(grad_MRC.dtype)
        size = lr * 0.2 * math.sqrt(direction_MRC.shape[-1])  # matches the RMS of AdamW's steps
        weights = list(map(_wide, matrices))
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * taken)
        torch._foreach_sub_(weights, direction_MRC.mul_(size * taken).unbind())

    def _momentum_buffer(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _wide(matrix: Any) -> Tensor:
    """The matrix, or its transpose if that has fewer rows."""
    wide: Tensor = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    return wide


def _batches(matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield batches of matrices of one shape."""
    by_shape: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        key = (*sorted(matrix.shape), matrix.dtype, matrix.device)
        by_shape.setdefault(key, []).append(matrix)
    for same_shape in by_shape.values():
        count = max(1, _BATCH // max(1, same_shape[0].numel()))
        yield from (same_shape[begin : begin + count] for begin in range(0, len(same_shape), count))


def _orthogonal(update_MRC: Tensor, group: dict[str, Any]) -> Tensor:
    """Each matrix with all its singular values near 1, by Newton-Schulz iteration."""
    a, b, c = group["ns_coefficients"]
    x_MRC = update_MRC.bfloat16()
    x_MRC /= x_MRC.flatten(1).norm(dim=1)[:, None, None].clamp_min(group["eps"])
    for _ in range(group["ns_steps"]):
        gram_MRR = x_MRC @ x_MRC.mT
        step_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=b, alpha=c)
        x_MRC = torch.baddbmm(x_MRC, step_MRR, x_MRC, beta=a)
    return x_MRC


# --- optimizer ------------------------------------------------------------------------------------

GUARD_WINDOW = 64  # number of recent gradient norms kept
GUARD_WARMUP = 16  # good steps needed before a norm can count as a spike

_LARGE = 2**20  # elements above which a tensor is worth its own kernel launch


class SkippingAdamW(torch.optim.AdamW):
    """torch's AdamW, with the attributes that its fused kernel reads, as a gradient scaler would
    set them. On a GPU, large tensors are updated by fledge's own kernel."""

    found_inf: Tensor | None = None  # above 0: the step is skipped
    grad_scale: Tensor | None = None  # what gradients are divided by

    def _accelerator_graph_capture_health_check(self) -> None:
        """Skip torch's check for `capturable`, which only unfused kernels need: the step count is
        on the device already, and so is the learning rate when an update is recorded."""

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check  # torch < 2.11

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "gradients are computed before the step"
        updated = [p for group in self.param_groups for p in self._update_large(group)]
        grads = [p.grad for p in updated]
        for p in updated:
            p.grad = None  # so that torch skips it
        super().step()
        for p, grad in zip(updated, grads, strict=True):
            p.grad = grad

    def _update_large(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """Update the parameters that our kernel supports, and return them. A parameter's first step
        is left to torch, which creates its state."""
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
    """Whether our kernel updates a parameter. torch updates small ones, which are faster in one
    fused launch, and sharded ones (DTensor)."""
    if p.grad is None or p.numel() < _LARGE or isinstance(p, DTensor):
        return False
    tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
    return all(tensor.is_contiguous() for tensor in tensors) and kernel_runs(p, what="AdamW")


Skipping = SkippingAdamW | SkippingMuon


def make_optimizers(
    draft: nn.Module,
    *,
    optimizer: str = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Skipping, ...]:
    """The optimizers of the trained parameters: AdamW, and Muon for matrices if `optimizer` is
    "muon". Muon's steps are scaled to the size of AdamW's, so both share one learning rate and one
    weight decay, which is on matrices only, not on norms and placeholders."""
    muon = trained_by_muon(draft) if optimizer == "muon" else {}
    rest = [p for name, p in draft.named_parameters() if p.requires_grad and name not in muon]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    adamw = SkippingAdamW(
        [group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True
    )
    if not muon:
        return (adamw,)
    return adamw, SkippingMuon(muon.values(), lr=lr, weight_decay=weight_decay)


def trained_by_muon(draft: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices that map hidden states to hidden states: those of the layers, and fc. Embeddings
    and heads, whose rows are tokens, are excluded."""
    return {
        name: parameter
        for name, parameter in draft.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and name.startswith(("layers.", "fc."))
    }


def state_like(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Tensors with the names, shapes and dtypes of an optimizer's state for a parameter."""
    if isinstance(optimizer, SkippingMuon):
        return {"momentum_buffer": parameter}
    return {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def clip_gradients(
    optimizers: Sequence[Skipping],
    parameters: Sequence[nn.Parameter],
    limit: float | None,
) -> Tensor:
    """Clip the gradients to a total norm of `limit`; return their norm before clipping. On a GPU,
    AdamW scales them during its update, which saves one read and write of all gradients."""
    limit = math.inf if limit is None else limit
    norm = whole_tensor(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    excess = (norm + 1e-6) / limit  # as in torch.nn.utils.clip_grads_with_norm_
    for optimizer in optimizers:
        if norm.is_cuda and isinstance(optimizer, SkippingAdamW):
            optimizer.grad_scale = excess.clamp_min(1.0).float()
        else:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grads_with_norm_(trained, limit, norm)
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
    """The learning rate of a step: linear warm-up to `peak`, then a decay to `final_share` of it.

    The decay is `cosine` or `linear` over all remaining steps, `wsd` (1 - sqrt) over the last
    `decay_share` of all steps, or absent (`constant`).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    begin = max(warmup, total - math.ceil(decay_share * total)) if schedule == "wsd" else warmup
    progress = max(0, step - begin) / max(1, total - begin)
    decay = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "wsd": 1 - math.sqrt(progress),
    }
    return peak * (final_share + (1 - final_share) * decay[schedule])


class StepGuard:
    """Judges steps by their gradient norm: a step is bad if its norm is not finite or far above the
    recent median. So is a step on a non-finite answer of the target, whatever its gradient."""

    def __init__(self, spike_factor: float | None, device: torch.device) -> None:
        self._factor = math.inf if spike_factor is None else spike_factor
        self.norms = torch.full((GUARD_WINDOW,), math.nan, device=device)  # a ring buffer
        self.good = torch.zeros((), dtype=torch.int64, device=device)  # number of good steps
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, norm: Tensor, broken: Tensor | None = None) -> Tensor:
        """Return whether a step is bad, as a bool tensor on the device; keep a good norm."""
        spike = (self.good >= GUARD_WARMUP) & (norm > self._factor * self.median())
        bad = ~torch.isfinite(norm) | spike
        if broken is not None:
            bad = bad | broken
        slot = (self.good % GUARD_WINDOW).reshape(1)
        kept = torch.where(bad, self.norms.index_select(0, slot), norm.to(self.norms.dtype))
        self.norms.index_copy_(0, slot, kept)
        self.good += ~bad
        self.bad_in_a_row.copy_(torch.where(bad, self.bad_in_a_row + 1, 0))
        return bad

    def median(self) -> Tensor:
        """`norms.nanmedian()` without its synchronization on a GPU."""
        middle = (self.norms.isnan().logical_not().sum() - 1).clamp_min(0) // 2
        ordered = self.norms.sort().values  # NaNs come last
        return ordered.index_select(0, middle.reshape(1)).squeeze(0)

    def state(self) -> dict[str, Tensor]:
        return {"norms": self.norms, "good": self.good, "bad_in_a_row": self.bad_in_a_row}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
