"""Hostile clients: floods of connections and endless headers must not lock out anybody else."""

import asyncio
import contextlib
import http.client
import logging
import os
import resource
import socket
import ssl
import statistics
import threading
import time

import pytest

from fledge.target.remote.server.connections import (
    Connection,
    ConnectionLimits,
    Connections,
    Listener,
    raise_file_limit,
)
from fledge.target.remote.server.run import Address
from target.remote.servers import Held, call, question, running, wait_for

HEAD = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n"


def connect(port, source="127.0.0.1"):
    return socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))


def ask(port, source):
    """Ask one question on a new connection; returns the seconds until its successful reply."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, 10, source_address=(source, 0))
    connection.request("POST", "/v1/generate", body=question())
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    reply.read()
    connection.close()
    return time.perf_counter() - begin


def closed(raw, within_s=10.0):
    """Whether the server closes this connection."""
    raw.settimeout(within_s)
    try:
        while raw.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_1100_half_open_connections_and_endless_headers_lock_nobody_out(nursery):
    raise_file_limit()
    pid, port = nursery.start()
    over, half_open = threading.Event(), []

    def send_endlessly():
        """Send headers that never end, and reconnect whenever the server closes the connection."""
        while not over.is_set():
            with contextlib.suppress(OSError), connect(port) as raw:
                raw.sendall(HEAD + b"X-Long: ")
                while not over.wait(0.005):
                    raw.sendall(b"a" * 1000)

    attackers = [threading.Thread(target=send_endlessly) for _ in range(2)]
    try:
        ask(port, "127.0.0.2")
        usual = statistics.median(ask(port, "127.0.0.2") for _ in range(25))
        for _ in range(1100):
            raw = connect(port)
            raw.sendall(HEAD)
            half_open.append(raw)
        for attacker in attackers:
            attacker.start()
        attacked = statistics.median(ask(port, "127.0.0.2") for _ in range(25))
        same_address = [ask(port, "127.0.0.1") for _ in range(5)]
        assert attacked < 2 * usual, (attacked, usual)
        assert max(same_address) < 5.0
        assert len(os.listdir(f"/proc/{pid}/fd")) < 64 + 60
    finally:
        over.set()
        for attacker in attackers:
            if attacker.ident:
                attacker.join()
        for raw in half_open:
            raw.close()
        nursery.kill(pid)


def endless():
    chunked = b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    yield "value", HEAD + b"X: ", b"a" * 4000
    yield "name", HEAD, b"a" * 4000
    yield "headers", HEAD, b"A: b\r\n" * 500
    yield "target", b"GET /", b"a" * 4000
    yield "method", b"", b"\r\n" * 2000
    yield "trailers", chunked + b"0\r\n", b"A: b\r\n" * 500
    yield "trailer", chunked + b"0\r\nX: ", b"a" * 4000
    yield "extension", chunked + b"1;", b"a" * 4000
    yield "small chunks", chunked, b"1\r\na\r\n" * 500
    yield "requests", b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500


@pytest.mark.parametrize(
    ("begin", "more"), [e[1:] for e in endless()], ids=[e[0] for e in endless()]
)
def test_endless_input_is_cut_off(server, begin, more):
    sent = 0
    with connect(server.port) as raw:
        raw.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            raw.sendall(begin)
            while sent < 32 << 20:
                raw.sendall(more)
                sent += len(more)
            pytest.fail("the server takes everything")
    assert call(server, "/health")[0] == 200


def test_too_many_headers_are_431(server):
    with connect(server.port) as raw:
        raw.sendall(HEAD + b"A: b\r\n" * 101 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 431 ")
        assert closed(raw)
    many = {f"X-{i}": "x" * 100 for i in range(90)}
    assert call(server, "/v1/info", headers=many)[0] == 200


def test_the_header_timeout_applies_to_first_and_later_requests(server):
    with running(connections=ConnectionLimits(header_s=0.4)) as started:
        silent, partial, second = (connect(started.port) for _ in range(3))
        partial.sendall(HEAD)
        second.sendall(HEAD + b"\r\n")
        assert second.recv(100).startswith(b"HTTP/1.1 200")
        second.sendall(HEAD)
        for raw in (silent, partial, second):
            assert closed(raw, 5.0)
            raw.close()
        with connect(started.port) as kept:  # a complete request, then a pause
            kept.sendall(HEAD + b"\r\n")
            assert kept.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert not closed(kept, 2.0)
        assert "fledge_dropped_connections_total 3" in started.server.metrics.text()


def test_missing_tls_handshakes_lock_nobody_out(certificate):
    cert, key = certificate
    limits = ConnectionLimits(max_connections=4, max_per_address=4, header_s=0.5)
    address = Address(port=0, tls_cert=cert, tls_key=key)
    with running(address=address, token="t", connections=limits) as started:
        silent = [connect(started.port) for _ in range(20)]
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", started.port, timeout=5, context=context
        )
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        assert all(closed(raw, 5.0) for raw in silent)
        for raw in silent:
            raw.close()


def test_connections_with_active_requests_are_never_evicted(monkeypatch):
    limits = ConnectionLimits(max_connections=3, max_per_address=2)
    with running(connections=limits) as started:
        gate = Held(started, monkeypatch)
        busy = []
        for source in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
            client = http.client.HTTPConnection(
                "127.0.0.1", started.port, 20, source_address=(source, 0)
            )
            client.request("POST", "/v1/generate", body=question(request_id=f"{len(busy)}" * 32))
            busy.append(client)
        wait_for(lambda: "fledge_pending_requests 3" in started.server.metrics.text())
        for source in ("127.0.0.2", "127.0.0.4"):
            with connect(started.port, source) as raw:
                assert closed(raw, 5.0)
        gate.go.set()
        assert [client.getresponse().status for client in busy] == [200, 200, 200]
        for client in busy:
            client.close()


class Ends:
    """Connections as a listener would create them, with freely chosen addresses."""

    def __init__(self, **limits):
        self.all, self.ends = Connections(ConnectionLimits(**limits)), {}

    def add(self, home, port):
        near, far = socket.socketpair()
        connection = Connection(near.family, near.type, near.proto, fileno=near.detach())
        connection.peer, connection.home = (home, port), home
        self.ends[home, port] = connection, far
        if self.all.add(connection):
            return True
        connection.close()
        return False

    def gone(self):
        closed_peers = set()
        for peer, (_, far) in self.ends.items():
            far.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                assert far.recv(1) == b""
                closed_peers.add(peer)
        return closed_peers

    def close(self):
        for connection, far in self.ends.values():
            connection.close()
            far.close()


def test_which_connection_is_evicted():
    ends = Ends(max_connections=4, max_per_address=2)
    add, gone = ends.add, ends.gone
    with ends.all.busy(("nobody", 0)):
        pass
    assert add("a", 1)
    with ends.all.busy(("a", 1)):
        pass  # now idle
    assert add("a", 2)
    assert add("a", 3)  # one too many from a: the silent one is closed, not the older idle one
    assert gone() == {("a", 2)}
    assert add("b", 1)
    assert add("c", 1)
    with ends.all.busy(("a", 3)), ends.all.busy(("b", 1)), ends.all.busy(("c", 1)):
        assert add("d", 1)  # only an idle one can be closed
        assert gone() == {("a", 2), ("a", 1)}
        with ends.all.busy(("d", 1)):
            assert not add("e", 1)  # all are busy
            assert len(ends.all) == 4
        assert add("e", 1)
    assert len(ends.all) == 4
    ends.close()
    assert len(ends.all) == 0


def test_ipv6_addresses_of_one_network_count_as_one():
    from fledge.target.remote.server.connections import _home

    assert _home("10.0.0.1") != _home("10.0.0.2")
    assert _home("2001:db8::1") == _home("2001:db8::ffff:1") != _home("2001:db8:0:1::1")
    assert _home("::ffff:10.0.0.1") == "10.0.0.1"
    assert _home("fe80::1%eth0") == _home("fe80::2%eth0")


def test_connections_use_at_most_half_of_the_file_limit(caplog):
    limits = ConnectionLimits(max_connections=1024)
    assert limits.below(20_000) is limits
    with caplog.at_level(logging.WARNING, "fledge.remote"):
        assert limits.below(1024).max_connections == 512
    assert "1024" in caplog.text


def test_the_file_limit_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 512), hard))
    try:
        assert raise_file_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_noise_is_not_logged(server, capfd):
    for _ in range(3):
        with connect(server.port) as raw:
            raw.sendall(b"\0\1\2\3\r\n\r\n")
            assert closed(raw)
    assert capfd.readouterr().err == ""


def test_a_client_that_reads_nothing_is_eventually_disconnected():
    """An unread reply stays in the transport's buffer, and closing would wait for it forever."""

    async def run():
        with Listener(socket.AF_INET, ConnectionLimits()) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            loop, transports = asyncio.get_running_loop(), asyncio.Queue()

            class Full(asyncio.Protocol):
                def connection_made(self, transport):
                    transport.write(b"x" * (64 << 20))
                    transport.close()
                    transports.put_nowait(transport)

            listening = await loop.create_server(Full, sock=listener)
            with socket.create_connection(listener.getsockname()):
                transport = await transports.get()
                listener.connections.find(transport.get_extra_info("peername")).due = 0.0
                listener.connections.drop_late()
                for _ in range(100):
                    await asyncio.sleep(0.01)
                    if transport.get_write_buffer_size() == 0:
                        break
                assert transport.get_write_buffer_size() == 0
                assert len(listener.connections) == 0
            listening.close()

    asyncio.run(run())
