"""The exponential moving average of a draft's weights (`training.ema`).

    mean <- d * mean + (1 - d) * weights,  d = min(decay, t / (t + 9)) after good step t (1, 2, ...)

It starts from the weights before the first step; the second term of the minimum makes even a short
run discount these. A skipped step leaves the mean unchanged.

The mean is what is evaluated, saved and exported. The optimizer works on the weights, and the mean
is kept aside; while the draft is evaluated or saved, the two are swapped, which copies values and
rounds nothing. Checkpoints hold the mean as the draft, and the weights beside it.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fledge.train.sharding import local_tensor


class Average:
    """The average of some parameters, which are always passed in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._decay = decay
        self.aside = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, parameters: Sequence[nn.Parameter], *, taken: Tensor, bad: Tensor) -> None:
        """Update the mean after a step: good step number `taken`, or a skipped one if `bad`; both
        are tensors on the device."""
        taken = taken.double()
        weight = 1 - (taken / (taken + 9)).clamp(max=self._decay)
        weight = torch.where(bad, torch.zeros_like(weight), weight)
        for mean, parameter in zip(self.aside, parameters, strict=True):
            local_mean = local_tensor(mean)
            local_mean.lerp_(local_tensor(parameter), weight.to(local_mean.dtype))

    @torch.no_grad()
    def swap(self, parameters: Sequence[nn.Parameter]) -> None:
        for mean, parameter in zip(self.aside, parameters, strict=True):
            aside, current = local_tensor(mean), local_tensor(parameter)
            weights = current.clone()
            current.copy_(aside)
            aside.copy_(weights)

    @contextlib.contextmanager
    def swapped(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        self.swap(parameters)
        try:
            yield
        finally:
            self.swap(parameters)
