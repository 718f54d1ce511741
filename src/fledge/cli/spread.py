"""`--ray`: run the work of a verb in workers on a Ray cluster, controlled from this process."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fledge.core.errors import BadInput


def opened_spread(
    ray: bool, address: str, workers: int | None, *, gpus: int = 1, device: str = ""
) -> AbstractContextManager[Any]:
    """Opens the workers, with `gpus` GPUs each; yields None without --ray."""
    if ray:
        from fledge.target.ray.spread import Spread

        device = device.partition(":")[0]
        return Spread[Any](address, workers=workers, gpus=gpus, device=device)
    for option, given in (("--workers", workers is not None), ("--address", address != "auto")):
        if given:
            raise BadInput("is for a cluster", where=option, fix="add --ray, or leave it out")
    return nullcontext()
