"""Copies between the host and a device without synchronization.

Events are recorded on the device that they are about, which need not be the current one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, copied from pinned memory: other copies to a GPU synchronize."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which streams, events and recordings belong to `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def record_event(device: torch.device, *, timed: bool = False) -> torch.cuda.Event:
    """A CUDA event behind all work that was queued on `device` so far; a timed one can also measure
    durations."""
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]  # torch's own
    event.record(torch.cuda.current_stream(device))
    return event


class Fetched:
    """A small tensor that is being copied to the host. `read` waits only for work that was queued
    before the copy; reading the tensor itself would also wait for all work queued since."""

    def __init__(self, tensor: Tensor) -> None:
        self._on_host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._on_host.copy_(tensor, non_blocking=True)
            self._event = record_event(tensor.device)

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._on_host
