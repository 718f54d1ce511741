"""Real target servers for tests: uvicorn in a thread, on a port from the OS."""

import copy
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from target.contract import padded_rows
from target.tiny_models import tiny_model

pytest.importorskip("uvicorn", reason="needs the serve extra")

from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.protocol import Question
from fledge.target.remote.server.app import TargetServer
from fledge.target.remote.server.run import Address, make_uvicorn
from fledge.target.remote.wire import unpack


@cache
def tiny():
    return tiny_model("llama")


class Running:
    """A server in a thread of this process; `stop` drains it as SIGTERM would."""

    def __init__(self, *, model=None, backend=None, port=0, drain_s=5, **options):
        # each server has its own model: hooks of concurrent passes would interfere
        model = copy.deepcopy(model or tiny())
        backend = backend or HFEagle3TargetModel(model, supervision="hidden")
        self.server = TargetServer(backend, model="tiny", **options)
        self.address = Address(port=port)
        self._bound = self.address.bind()
        self._bound.listen(128)
        self.url = self.address.url(self._bound)
        self.port = self._bound.getsockname()[1]
        self.web = make_uvicorn(self.server, drain_s=drain_s)
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


def call(server, path, body=None, *, method=None, headers=None):
    """(status, headers, body) of one plain request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    method = method or ("GET" if body is None else "POST")
    connection.request(method, path, body=body, headers=headers or {})
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, reply.headers, data


def question(**changes):
    fields = {"request_id": "0" * 32, "rows": TokenBatch(*padded_rows()), **changes}
    return Question(**fields).to_message().to_bytes()


def answers(server):
    """Whether the server still answers a valid question correctly."""
    status, _, data = call(server, "/v1/generate", question())
    tensors, _ = unpack(bytearray(data))
    aux_states = expected().aux_hidden_states
    return status == 200 and torch.equal(tensors["aux_hidden_states"], aux_states)


def expected(seed=0):
    """What a server of `tiny` answers about padded rows."""
    return HFEagle3TargetModel(tiny(), supervision="hidden").generate_batch(*padded_rows(seed))


def health(server):
    """The server's counters, as anyone can read them."""
    return json.loads(call(server, "/health")[2])


class Held:
    """Makes a server's target wait for `go` before it answers."""

    def __init__(self, server, monkeypatch):
        self.go, self.begun, self.calls = threading.Event(), threading.Semaphore(0), 0
        backend = server.server.target.backend
        real = backend.answer

        def waiting(*args):
            self.calls += 1
            self.begun.release()
            assert self.go.wait(30)
            return real(*args)

        monkeypatch.setattr(backend, "answer", waiting)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def listening(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
