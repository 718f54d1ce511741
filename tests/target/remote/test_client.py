"""The client with real servers that come, go and change, under short timeouts."""

import logging
import threading
import time
from contextlib import closing

import pytest
import torch

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.fleet import Fleet
from fledge.target.remote.http import Server
from target.contract import padded_rows
from target.remote.chaos import Proxy, free_port
from target.remote.servers import Held, Running, expected, health, running, wait_for
from target.tiny_models import tiny_model

QUICK = {"timeout_s": 20.0, "wait_s": 20.0}


def requests(server):
    return health(server)["questions"]


def right(batch, seed=0):
    return torch.equal(batch.aux_hidden_states, expected(seed).aux_hidden_states)


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


@pytest.mark.parametrize(
    ("seed", "layers", "what"),
    [
        (1, [1, 3, 4], "weights_fingerprint"),
        (0, [1, 3, 5], r"aux_layer_ids: \[1, 3, 5\], not \[1, 3, 4\]"),
    ],
)
def test_servers_with_different_targets_are_refused(seed, layers, what):
    other = HFEagle3TargetModel(tiny_model("llama", seed=seed), layers, supervision="hidden")
    with (
        running() as first,
        running(backend=other) as second,
        pytest.raises(BadInput, match=rf"holds another target than .*{what}"),
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
        wait_for(
            lambda: "cannot be used: " in caplog.text and "holds another target" in caplog.text
        )
        assert all(right(target.generate_batch(*padded_rows(seed)), seed) for seed in range(10))
        assert requests(first) == 0
    first.stop()


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
    assert "waiting, for 1 s at most" in caplog.text
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


@pytest.mark.parametrize(
    ("mischief", "error"),
    [
        ("cut", "reply ended after|closed the"),
        ("garble", "digest"),
        ("stall", "no complete reply within"),
    ],
)
def test_a_request_that_always_fails_ends_after_its_retries(server, mischief, error):
    """/health always works, and every answer is damaged."""
    with (
        closing(Proxy(server.port, stall_s=30.0, spare=2000)) as proxy,
        RemoteEagle3TargetModel(proxy.url, **QUICK | {"timeout_s": 0.5}, retries=2) as target,
    ):
        target.generate_batch(*padded_rows())
        proxy.mischief = {mischief: 1.0}
        with pytest.raises(TargetUnreachable, match=f"attempts at one request .*{error}"):
            target.generate_batch(*padded_rows())
        assert proxy.done[mischief] >= 2
        proxy.mischief = {}
        assert right(target.generate_batch(*padded_rows()))


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
    with pytest.raises(BadInput, match="no server"):
        RemoteEagle3TargetModel([], wait_s=0.1)


def test_closing_ends_calls_that_wait_for_a_slow_server(monkeypatch):
    with running() as started:
        gate = Held(started, monkeypatch)
        target = RemoteEagle3TargetModel(started.url, **QUICK | {"timeout_s": 300.0})
        futures = [target.generate_batch_async(*padded_rows()) for _ in range(5)]
        assert gate.begun.acquire(timeout=20)
        begin = time.monotonic()
        target.close()
        assert time.monotonic() - begin < 10
        gate.go.set()
    for future in futures:
        assert future.cancelled() or isinstance(future.exception(), RuntimeError)
    names = {thread.name for thread in threading.enumerate()}
    assert not [name for name in names if name.startswith(("fledge-remote", "fledge-servers"))]


# --- which server is asked next, tested without servers ------------------------------------------


def fleet(rank, count):
    servers = [Server(f"http://t{number}") for number in range(count)]
    result = Fleet(servers, timeout_s=1, wait_s=1, rank=rank)
    for state in result._states:
        state.up = True
    return result


def take(rank_fleet, prefer=None):
    return rank_fleet._take(time.monotonic() + 1, prefer)[0]


def name(state):
    return state.server.url.removeprefix("http://")


@pytest.mark.parametrize(("ranks", "servers"), [(8, 4), (4, 4), (3, 2), (2, 3)])
def test_ranks_with_one_question_each_keep_all_servers_busy(ranks, servers):
    """Each rank sees only its own questions, so its fleet looks idle every time."""
    fleets = [fleet(rank, servers) for rank in range(ranks)]
    for _ in range(2 * servers):
        states = [take(rank_fleet) for rank_fleet in fleets]
        counts = [sum(name(state) == f"t{n}" for state in states) for n in range(servers)]
        assert max(counts) - min(counts) <= 1
        for state in states:
            state.in_flight -= 1


def test_the_server_with_the_fewest_questions_comes_first():
    rank_fleet = fleet(0, 3)
    first, second, third = (take(rank_fleet) for _ in range(3))
    assert {name(first), name(second), name(third)} == {"t0", "t1", "t2"}
    second.in_flight -= 1
    assert take(rank_fleet) is second
    assert name(take(rank_fleet, 1)) == "t1"  # ranks that share rows name the server
