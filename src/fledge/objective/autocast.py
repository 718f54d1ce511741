"""An objective under torch.autocast: the whole step in the dtype that it asks for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_autocast(kind: str) -> Iterator[torch.dtype | None]:
    """Switch torch.autocast off, and say which dtype it asked for: a step computes all of its
    matrices in one dtype, and its gradients, written out, in the same."""
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        yield None
        return
    asked = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        yield asked
