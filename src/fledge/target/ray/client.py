"""The target on a Ray cluster as a trainer sees it: the remote client, over servers that Ray places
and restarts.

`prefetch` questions per worker are in flight at once, over all ranks. The others wait here, so a
slow trainer fills no worker's memory.
"""

from typing import Any

import torch.distributed as dist

from fledge.core.errors import BadInput, first_line
from fledge.target.ray.connection import cause_of, import_ray
from fledge.target.ray.kind import RayTarget
from fledge.target.ray.placing import open_fleet
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.http import Buffers, Server, ServerDown

_TIMEOUT_S = 600.0  # of a question, over all attempts; the loss of a worker is noticed earlier
_FIND_S = 0.5  # for a worker that runs to say where


class Worker(Server):
    """The target server of one worker, wherever Ray has started it last."""

    def __init__(self, name: str, actor: Any, buffers: Buffers) -> None:
        target = name.rpartition(".")[2]  # RUN.target-0
        super().__init__(f"http://{target}", buffers=buffers)  # until its address is known
        self.actor = actor

    def find(self) -> None:
        """Ask the actor for the address of its server, which it may have to start first."""
        ray = import_ray()
        try:
            address, token = ray.get(self.actor.serve.remote(), timeout=_FIND_S)
        except ray.exceptions.RayTaskError as error:  # it answered with an exception
            cause = cause_of(error)
            raise cause if isinstance(cause, BadInput) else BadInput(first_line(cause)) from None
        except ray.exceptions.RayError as error:
            self.abort()  # nobody will answer
            raise ServerDown(first_line(error)) from None
        if address != self.url:
            self.abort()
            self._locate(address, token)


class RayEagle3TargetModel(RemoteEagle3TargetModel):
    """Target backend over the workers of a cluster, which the first rank starts unless they are
    running."""

    def __init__(self, section: RayTarget, *, aux_layers: int, pin_memory: bool = False) -> None:
        workers, self._release = open_fleet(section, aux_layers=aux_layers)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        prefetch = -(-section.prefetch * len(workers) // ranks)
        buffers = Buffers(keep=prefetch + 1)
        super().__init__(
            [Worker(name, actor, buffers) for name, actor in workers],
            supervision=section.supervision,
            prefetch=prefetch,
            timeout_s=_TIMEOUT_S,
            wait_s=section.wait_s,
            pin_memory=pin_memory,
        )

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._release()
