"""Real target servers for tests: uvicorn in a thread, on a port from the OS."""

import copy
import threading
from contextlib import contextmanager
from functools import cache

import pytest

from target.tiny_models import tiny_model

pytest.importorskip("uvicorn", reason="needs the serve extra")

from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.server.admission import Limits
from fledge.target.remote.server.app import TargetServer
from fledge.target.remote.server.run import Address, make_uvicorn


@cache
def tiny():
    return tiny_model("llama")


class Running:
    """A server in a thread of this process; `stop` drains it as SIGTERM would."""

    def __init__(
        self, *, model=None, backend=None, port=0, drain_s=5.0, address=None, connections=None,
        **options,
    ):  # fmt: skip
        # each server has its own model: hooks of concurrent passes would interfere
        model = copy.deepcopy(model or tiny())
        backend = backend or HFEagle3TargetModel(model, supervision="hidden")
        self.server = TargetServer(backend, model="tiny", **options)
        self.address = address or Address(port=port)
        self._bound = self.address.bind(connections)
        self._bound.listen(128)
        self.url = self.address.url(self._bound)
        self.port = self._bound.getsockname()[1]
        self.web = make_uvicorn(self.server, self.address, self._bound, drain_s=drain_s)
        self._thread = threading.Thread(
            target=lambda: self.web.run(sockets=[self._bound]), daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s=20.0):
        self.web.should_exit = True
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the server did not stop"
        self.server.queue.close()


@contextmanager
def running(**options):
    server = Running(**options)
    try:
        yield server
    finally:
        server.stop()


__all__ = ["Limits", "Running", "running", "tiny"]
