"""One target on a cluster: an ordinary target server in a Ray actor's process.

The actor loads the target when it is first asked for the server's address, rather than in its
constructor: a missing model is then an error that the caller gets, and not an actor that dies over
and over.
"""

import os
import secrets
import threading
import time
from typing import Any

from fledge.core.machine import find_device
from fledge.target.base import Eagle3TargetBackend
from fledge.target.kinds import LoadedTarget, kind_of
from fledge.target.remote.server.admission import Limits
from fledge.target.remote.server.app import TargetServer
from fledge.target.remote.server.run import Address, make_uvicorn

_REPORT_EVERY_S = 1.0
_KEPT_ANSWERS = 8  # for ranks that may never ask for them, having asked another worker


class TargetWorker:
    """The Ray actor that holds one target."""

    def __init__(
        self, name: str, section: LoadedTarget, *, aux_layers: int, gpus: float, board: Any
    ) -> None:
        self._name, self._board = name, board
        self._section = section.model_copy(update={"supervision": "hidden"})
        self._aux_layers, self._gpus = aux_layers, gpus
        self._server: TargetServer | None = None
        self._address = ("", "")
        self._started_at = time.monotonic()

    def serve(self) -> tuple[str, str]:
        """Load the target and serve it; returns the server's address and its token."""
        if self._server is None:
            import ray

            address = Address(host=ray.util.get_node_ip_address(), port=0)
            limits, token = Limits(kept_answers=_KEPT_ANSWERS), secrets.token_hex(32)
            server = TargetServer(
                self._open(),
                model=self._section.model,
                engine=self._section.backend,
                token=token,
                limits=limits,
            )
            bound = address.bind()
            web = make_uvicorn(server, address, drain_s=0)
            bound.listen(2048)
            self._server, self._address = server, (address.url(bound), token)
            threading.Thread(target=web.run, args=([bound],), daemon=True).start()
            threading.Thread(target=self._report, daemon=True).start()
        return self._address

    def figures(self) -> dict[str, float]:
        """Counters since the worker was started."""
        names = {"captured": "questions_total", "tokens": "tokens_total"}
        names["seconds"] = "pass_seconds_total"
        if self._server is None:
            return dict.fromkeys(names, 0.0)
        metrics = self._server.metrics
        return {name: metrics.value(counter) for name, counter in names.items()}

    def _open(self) -> Eagle3TargetBackend:
        device = find_device("cuda" if self._gpus else "cpu")
        section = self._section
        return kind_of(section).open(section, device=device, aux_layers=self._aux_layers)

    def _report(self) -> None:
        """Send the counters to the board whenever they have changed, without waiting for it."""
        import ray

        process: dict[str, Any] = {"node": ray.util.get_node_ip_address(), "pid": os.getpid()}
        process["node_id"], told = ray.get_runtime_context().get_node_id(), None
        while True:
            if (figures := self.figures()) != told:
                told, up_s = figures, time.monotonic() - self._started_at
                facts = {**process, **figures, "up_s": up_s}
                self._board.tell.remote("targets", self._name, facts)
            time.sleep(_REPORT_EVERY_S)
