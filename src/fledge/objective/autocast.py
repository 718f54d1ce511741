"""An objective under torch.autocast: the whole step runs in the dtype of autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_autocast(kind: str) -> Iterator[torch.dtype | None]:
    """Disable torch.autocast and yield its dtype (None if it was off). A step computes all matrix
    products in one dtype, and its hand-written gradients in the same."""
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        yield None
        return
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield dtype
