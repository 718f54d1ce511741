"""Tensors between the host and a device without waiting for it."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, through pinned memory: other copies to a GPU wait for the GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def new_event(*, timed: bool = False) -> torch.cuda.Event:
    """Recorded on a stream, it knows whether the device came there, and when if it is timed."""
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]  # torch's own


class Fetched:
    """A small tensor on its way to the host. Whoever reads it waits for what the device had been
    asked before; reading the tensor itself would wait for all that it was asked since, too."""

    def __init__(self, tensor: Tensor) -> None:
        self._here, self._event = tensor, None
        if tensor.is_cuda:
            self._here = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._event = new_event()
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._here
