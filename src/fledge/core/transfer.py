"""Copies between the host and a device without synchronization."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, copied from pinned memory: other copies to a GPU synchronize."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def new_event(*, timed: bool = False) -> torch.cuda.Event:
    """A CUDA event; a timed one can also measure durations."""
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]  # torch's own


class Fetched:
    """A small tensor that is being copied to the host. `read` waits only for work that was queued
    before the copy; reading the tensor itself would also wait for all work queued since."""

    def __init__(self, tensor: Tensor) -> None:
        self._on_host, self._event = tensor, None
        if tensor.is_cuda:
            self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._on_host.copy_(tensor, non_blocking=True)
            self._event = new_event()
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._on_host
