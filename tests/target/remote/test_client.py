"""The client with real servers that come, go and change, under short timeouts."""

import copy
import logging
import random
import threading
import time

import pytest
import torch

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.http import Server
from target.contract import padded_rows
from target.remote.chaos import Proxy, free_port
from target.remote.servers import Running, running, tiny
from target.tiny_models import tiny_model

QUICK = {"timeout_s": 20.0, "wait_s": 20.0, "shared_memory": False}


def expected(seed=0):
    return HFEagle3TargetModel(tiny(), supervision="hidden").generate_batch(*padded_rows(seed))


def right(batch, seed=0):
    return torch.equal(batch.aux_hidden_states, expected(seed).aux_hidden_states)


def requests(server):
    name = 'fledge_http_requests_total{path="/v1/generate",status="200"} '
    lines = [line for line in server.server.metrics.text().splitlines() if line.startswith(name)]
    return int(lines[0].split()[-1]) if lines else 0


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_work_is_shared_and_a_dead_server_is_skipped_until_it_is_back(caplog):
    port = free_port()
    first = Running(port=port)
    with running() as second, caplog.at_level(logging.WARNING, "fledge.remote"):
        urls = [first.url, second.url]
        with RemoteEagle3TargetModel(urls, prefetch=4, **QUICK) as target:
            futures = [target.generate_batch_async(*padded_rows(seed)) for seed in range(40)]
            assert all(right(future.result(30), seed) for seed, future in enumerate(futures))
            assert min(requests(first), requests(second)) >= 5
            first.stop()
            assert all(right(target.generate_batch(*padded_rows(seed)), seed) for seed in range(5))
            wait_for(lambda: "set aside" in caplog.text)
            first = Running(port=port)
            wait_for(lambda: "is back" in caplog.text)
            futures = [target.generate_batch_async(*padded_rows(seed)) for seed in range(40)]
            assert all(right(future.result(30), seed) for seed, future in enumerate(futures))
            assert requests(first) >= 5
    first.stop()


def test_the_least_loaded_server_is_asked(monkeypatch):
    with running() as busy, running() as idle:
        go = threading.Event()
        backend = busy.server.target.backend
        real = backend.answer

        def blocked(*args):
            assert go.wait(30)
            return real(*args)

        monkeypatch.setattr(backend, "answer", blocked)
        with RemoteEagle3TargetModel([busy.url, idle.url], prefetch=3, **QUICK) as target:
            futures = [target.generate_batch_async(*padded_rows(seed)) for seed in range(20)]
            wait_for(lambda: sum(future.done() for future in futures) >= 17)
            assert requests(idle) >= 17  # while at most prefetch requests wait at the other
            go.set()
            assert all(right(future.result(30), seed) for seed, future in enumerate(futures))


def test_servers_with_different_weights_are_refused():
    torch.manual_seed(5)
    other = tiny_model("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1.0
    with (
        running() as first,
        running(model=other) as second,
        pytest.raises(BadInput, match=r"holds another target than .*weights_fingerprint"),
    ):
        RemoteEagle3TargetModel([first.url, second.url], **QUICK)


def test_a_server_that_comes_back_with_other_weights_is_not_used(caplog):
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.embed_tokens.weight[5] += 1.0
    port = free_port()
    first = Running(port=port)
    with (
        running() as second,
        caplog.at_level(logging.WARNING, "fledge.remote"),
        RemoteEagle3TargetModel([first.url, second.url], **QUICK) as target,
    ):
        assert right(target.generate_batch(*padded_rows()))
        first.stop()
        wait_for(lambda: "set aside" in caplog.text)
        first = Running(port=port, model=other)
        wait_for(lambda: "is not used: another target" in caplog.text)
        assert all(right(target.generate_batch(*padded_rows(seed)), seed) for seed in range(10))
        assert requests(first) == 0
    first.stop()


def test_servers_with_different_aux_layers_are_refused():
    shifted = HFEagle3TargetModel(copy.deepcopy(tiny()), [1, 3, 5], supervision="hidden")
    with (
        running() as first,
        running(backend=shifted) as second,
        pytest.raises(BadInput, match=r"aux_layer_ids: \[1, 3, 5\], not \[1, 3, 4\]"),
    ):
        RemoteEagle3TargetModel([first.url, second.url], **QUICK)


def test_unreachable_servers_are_reported_after_the_wait(caplog):
    url = f"http://127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "fledge.remote"),
        pytest.raises(TargetUnreachable, match=rf"no target server answered for 1 s \({url}: "),
    ):
        RemoteEagle3TargetModel(url, wait_s=1.0)
    assert 1.0 <= time.monotonic() - begin < 10
    assert "no target server answers" in caplog.text
    assert "waiting, for another 1 s at most" in caplog.text
    assert isinstance(TargetUnreachable("x"), BadInput)


def test_the_client_waits_for_a_server_that_starts_late():
    port = free_port()
    late = {}
    timer = threading.Timer(0.8, lambda: late.update(server=Running(port=port)))
    timer.start()
    with RemoteEagle3TargetModel(f"http://127.0.0.1:{port}", **QUICK) as target:
        assert right(target.generate_batch(*padded_rows()))
    timer.join()
    late["server"].stop()


def test_calls_fail_after_the_wait_when_all_servers_vanish(caplog):
    started = Running()
    with RemoteEagle3TargetModel(started.url, **QUICK | {"wait_s": 1.0}) as target:
        assert right(target.generate_batch(*padded_rows()))
        started.stop()
        with (
            caplog.at_level(logging.WARNING, "fledge.remote"),
            pytest.raises(TargetUnreachable, match="run the same command again"),
        ):
            target.generate_batch(*padded_rows())
    assert "waiting" in caplog.text


@pytest.mark.parametrize(
    ("mischief", "error"),
    [
        ("cut", "reply ended after|closed the"),
        ("garble", "digest"),
        ("stall", "still waiting for the"),
    ],
)
def test_a_request_that_always_fails_ends_after_its_retries(server, mischief, error):
    """/health always works, and every answer is damaged."""
    proxy = Proxy(server.port, stall_s=30.0, spare=2000)
    try:
        with RemoteEagle3TargetModel(proxy.url, **QUICK | {"timeout_s": 0.5}, retries=2) as target:
            target.generate_batch(*padded_rows())
            proxy.mischief = {mischief: 1.0}
            with pytest.raises(TargetUnreachable, match=f"attempts at one request .*{error}"):
                target.generate_batch(*padded_rows())
            assert proxy.done[mischief] >= 2
            proxy.mischief = {}
            assert right(target.generate_batch(*padded_rows()))
    finally:
        proxy.close()


def test_closing_ends_the_pause_between_two_attempts(server, monkeypatch):
    monkeypatch.setattr("fledge.target.remote.client._FIRST_PAUSE_S", 30.0)
    proxy = Proxy(server.port, spare=2000)
    try:
        with RemoteEagle3TargetModel(proxy.url, **QUICK) as target:
            proxy.mischief = {"cut": 1.0}
            future = target.generate_batch_async(*padded_rows())
            wait_for(lambda: proxy.done["cut"])
            begin = time.monotonic()
        assert time.monotonic() - begin < 15
        assert future.exception() is not None
    finally:
        proxy.close()


def test_trickling_replies_do_not_outlast_the_deadline(server):
    """Bytes keep coming, so no single wait is long; the whole reply still has its deadline."""
    proxy = Proxy(server.port, mischief={"trickle": 1.0})
    try:
        with RemoteEagle3TargetModel(
            proxy.url, retries=0, timeout_s=30.0, wait_s=5.0, shared_memory=False
        ) as target:
            assert right(target.generate_batch(*padded_rows()))  # slow but right
            target._timeout_s = 0.03
            with pytest.raises(TargetUnreachable):
                target.generate_batch(*padded_rows())
    finally:
        proxy.close()


def test_idle_connections_that_the_server_closed_are_not_a_failure(server, caplog):
    with RemoteEagle3TargetModel(server.url, **QUICK) as target:
        assert right(target.generate_batch(*padded_rows()))
        for connection in target._fleet._states[0].server._idle:
            connection.sock.shutdown(2)
        with caplog.at_level(logging.WARNING, "fledge.remote"):
            assert right(target.generate_batch(*padded_rows()))
    assert "set aside" not in caplog.text


def test_addresses_are_checked():
    for url in ("ftp://x", "127.0.0.1:80", "http://", "http://host/path"):
        with pytest.raises(BadInput):
            RemoteEagle3TargetModel(url, wait_s=0.1)
    with pytest.raises(BadInput, match=r"ca_file nowhere\.pem: no certificates"):
        RemoteEagle3TargetModel("https://127.0.0.1:1", ca_file="nowhere.pem", wait_s=0.1)
    with pytest.raises(BadInput, match="no server"):
        RemoteEagle3TargetModel([], wait_s=0.1)


def test_closing_ends_calls_that_wait_for_a_slow_server(monkeypatch):
    with running() as started:
        go, entered = threading.Event(), threading.Event()
        backend = started.server.target.backend

        def blocked(*args):
            entered.set()
            assert go.wait(30)
            raise RuntimeError("too late")

        monkeypatch.setattr(backend, "answer", blocked)
        target = RemoteEagle3TargetModel(started.url, **QUICK | {"timeout_s": 300.0})
        futures = [target.generate_batch_async(*padded_rows()) for _ in range(5)]
        assert entered.wait(20)
        begin = time.monotonic()
        target.close()
        assert time.monotonic() - begin < 10
        go.set()
    for future in futures:
        assert future.cancelled() or isinstance(future.exception(), RuntimeError)
    names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith(("fledge-remote", "fledge-servers"))]


def test_an_exchange_that_ends_after_closing_leaves_no_connection(server):
    class Leaving(Server):
        def _receive(self, connection, *rest):
            self.used = connection
            reply = super()._receive(connection, *rest)
            self.close()  # as another thread may, once the reply is complete
            return reply

    leaving = Leaving(server.url)
    assert leaving.get_json("/health", timeout_s=10)["status"] == "ok"
    assert leaving.used.sock is None


def test_a_client_leaves_the_global_random_state_alone(server):
    random.seed(1)
    with RemoteEagle3TargetModel([server.url], **QUICK) as target:
        target.generate_batch(*padded_rows())
    assert random.random() == random.Random(1).random()
