"""The exponential mean of a draft's weights (`training.ema`): what is measured, kept and exported.

    mean <- d * mean + (1 - d) * weights,  d = min(decay, t / (t + 9)) after good step t (1, 2, ...)

from the weights before the first step. The second term of the minimum lets a short run forget where
it began. A skipped step leaves the mean as it is.

The optimizer works on the weights; the mean lies aside. For as long as the draft is to be the one
that counts the two change places, which copies numbers and rounds none: checkpoints hold the mean
as the draft, and the weights beside it.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fledge.train.sharding import local_tensor


class Average:
    """Of some parameters, always given in the same order."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._decay = decay
        self.aside = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, parameters: Sequence[nn.Parameter], *, taken: Tensor, bad: Tensor) -> None:
        """After a step, which was good (number `taken`) or skipped; both are on the device."""
        taken = taken.double()
        new = 1 - (taken / (taken + 9)).clamp(max=self._decay)
        new = torch.where(bad, torch.zeros_like(new), new)
        for mean, parameter in zip(self.aside, parameters, strict=True):
            own = local_tensor(mean)
            own.lerp_(local_tensor(parameter), new.to(own.dtype))

    @torch.no_grad()
    def swap(self, parameters: Sequence[nn.Parameter]) -> None:
        for mean, parameter in zip(self.aside, parameters, strict=True):
            aside, own = local_tensor(mean), local_tensor(parameter)
            weights = own.clone()
            own.copy_(aside)
            aside.copy_(weights)

    @contextlib.contextmanager
    def swapped(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        self.swap(parameters)
        try:
            yield
        finally:
            self.swap(parameters)
