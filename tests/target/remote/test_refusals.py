"""What a server refuses, in one line: large, stalled and malformed requests, foreign hosts, tokens
and encrypted keys; requests are counted before they are read, and dropped when their client leaves.
Servers end cleanly."""

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.remote.client import RemoteEagle3TargetModel, token_from
from fledge.target.remote.server.run import Address
from fledge.target.remote.wire import Message
from target.contract import packed_rows, padded_rows
from target.remote.chaos import resident_bytes
from target.remote.servers import Held, Limits, call, listening, question, running, wait_for

MB = 1_000_000


def head(length):
    line = "POST /v1/generate HTTP/1.1\r\nHost: localhost\r\n"
    return f"{line}Content-Length: {length}\r\n\r\n".encode()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), 20)


def whole_reply(raw):
    """Read a reply whose body is JSON."""
    reply = b""
    while not reply.endswith(b"}"):
        reply += raw.recv(1000)
    return reply


@pytest.mark.slow
def test_memory_is_bounded_under_30_stalled_bodies_of_60_mb(nursery):
    pid, port = nursery.start(max_requests=64, max_bodies_bytes=256 * MB)
    try:
        assert http_status(port, question()) == 200
        before = resident_bytes(pid)
        piece, stalled, turned_away = memoryview(bytes(MB)), [], 0
        for _ in range(30):
            raw = connect(port)
            raw.sendall(head(60 * MB))
            for _ in range(59):
                raw.sendall(piece)
            stalled.append(raw)
        peak = resident_bytes(pid)
        for raw in stalled:
            raw.settimeout(0.2)
            try:
                reply = raw.recv(1000)
            except TimeoutError:
                continue
            assert reply.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: " in reply
            turned_away += 1
        assert turned_away == 30 - 256 // 60
        assert max(peak, resident_bytes(pid)) - before < (256 + 200) * MB
        for raw in stalled:
            raw.close()
        with RemoteEagle3TargetModel(f"http://127.0.0.1:{port}", wait_s=20.0) as target:
            target.generate_batch(*padded_rows())
    finally:
        nursery.kill(pid)


def http_status(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/generate", body=body)
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def test_a_body_is_refused_before_it_is_sent_and_the_connection_stays_usable():
    limits = Limits(max_body_bytes=60_000, max_bodies_bytes=100_000)
    with running(limits=limits) as started, connect(started.port) as first:
        first.sendall(head(60_000) + b"x")
        wait_for(lambda: "fledge_pending_body_bytes 60000" in started.server.metrics.text())
        with connect(started.port) as second:
            second.sendall(head(50_000))  # the body is not sent yet
            assert whole_reply(second).startswith(b"HTTP/1.1 429 ")
            first.close()
            wait_for(lambda: "fledge_pending_body_bytes 0" in started.server.metrics.text())
            second.sendall(bytes(50_000))  # discarded: already answered
            body = question()
            second.sendall(head(len(body)) + body)
            assert second.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_bodies_without_a_length_are_411(server):
    status, _, data = call(server, "/v1/generate", iter([question()]), method="POST")
    assert status == 411
    assert "Content-Length" in json.loads(data)["error"]


def test_a_body_that_does_not_arrive_is_408(server, monkeypatch):
    monkeypatch.setattr("fledge.target.remote.server.app._BODY_TIMEOUT_S", 0.2)
    with connect(server.port) as raw:
        raw.sendall(head(100) + b"abc")
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def error(server, **changes):
    status, _, data = call(server, "/v1/generate", question(**changes))
    return status, json.loads(data)["error"]


def test_rows_longer_than_the_context_are_refused_at_once(server, monkeypatch):
    """The tiny target's context is 64."""
    calls = []
    monkeypatch.setattr(server.server.target.backend, "answer", calls.append)
    wide = torch.ones(1, 65, dtype=torch.long)
    reason = "is longer than the target's context, 64"
    assert error(server, rows=TokenBatch(wide, wide, wide)) == (400, f"a row of 65 tokens {reason}")
    rows = TokenBatch(*packed_rows([[[5] * 65, [6] * 10]], 80))
    assert error(server, rows=rows) == (400, f"a document of 65 tokens {reason}")
    assert calls == []


def test_packed_rows_may_be_longer_than_the_context(server):
    rows = TokenBatch(*packed_rows([[[5] * 60, [6] * 10]], 80))
    assert call(server, "/v1/generate", question(rows=rows))[0] == 200


def test_attention_pairs_and_documents_are_bounded():
    with running(limits=Limits(max_attention=1000, max_documents=5)) as started:
        square = torch.ones(2, 25, dtype=torch.long)
        status, message = error(started, rows=TokenBatch(square, square, square))
        assert status == 413
        assert "1250 pairs" in message
        assert "1000 are allowed" in message
        rows = TokenBatch(*packed_rows([[[5] * 10, [6] * 10, [7] * 5], [[5] * 25]], 25))
        assert error(started, rows=rows)[0] == 413
        rows = TokenBatch(*packed_rows([[[5] * 10, [6] * 10, [7] * 5], [[5] * 20, [6] * 5]], 25))
        assert call(started, "/v1/generate", question(rows=rows))[0] == 200
        rows = TokenBatch(*packed_rows([[[5]] * 6], 6))
        assert error(started, rows=rows) == (413, "6 documents in one request, 5 are allowed")


def test_tensors_are_counted_before_they_are_widened(server, monkeypatch):
    """Masks are sent as bytes and used as int64: sizes are checked before anything is widened."""

    def never(tensor):
        raise AssertionError(f"widened {list(tensor.shape)}")

    ids = torch.ones(1, 4, dtype=torch.uint8)
    metadata = {"protocol": "1", "request_id": "0" * 32, "encoding": "hidden", "dtype": "auto"}
    large = torch.ones(600_000, dtype=torch.uint8)
    good = {"input_ids": ids, "attention_mask": ids, "loss_mask": ids}
    monkeypatch.setattr(torch.Tensor, "long", never)
    for changes, expected in (
        ({"attention_mask": large.view(1, -1)}, 400),
        ({"vocabulary": large}, 400),
        (dict.fromkeys(good, large.view(1, -1)), 413),
    ):
        body = Message({**good, **changes}, metadata).to_bytes()
        assert call(server, "/v1/generate", body)[0] == expected


def test_after_a_failed_pass_only_requests_still_waiting_are_retried(monkeypatch):
    with running() as started:
        backend, sizes = started.server.target.backend, []
        real, go, begun = backend.answer, threading.Event(), threading.Semaphore(0)

        def answer(rows):
            sizes.append(rows.shape[0])
            begun.release()
            if len(sizes) <= 2:
                assert go.wait(30)
            if len(sizes) == 2:
                raise RuntimeError("one of the merged rows is poison")
            return real(rows)

        monkeypatch.setattr(backend, "answer", answer)
        row = TokenBatch(*(tensor[:1] for tensor in padded_rows()))
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(call, started, "/v1/generate", question(rows=row))
            assert begun.acquire(timeout=20)
            stays = pool.submit(
                call, started, "/v1/generate", question(rows=row, request_id="1" * 32, alone=False)
            )
            leaves = http.client.HTTPConnection("127.0.0.1", started.port)
            leaves.request(
                "POST", "/v1/generate", body=question(rows=row, request_id="2" * 32, alone=False)
            )
            wait_for(lambda: "fledge_queue_requests 2" in started.server.metrics.text())
            go.set()
            go.clear()
            assert begun.acquire(timeout=20)  # the merged pass
            leaves.close()
            wait_for(lambda: "fledge_pending_requests 1" in started.server.metrics.text())
            go.set()
            assert [first.result()[0], stays.result()[0]] == [200, 200]
        assert sizes == [1, 2, 1]
        assert "fledge_abandoned_total 1" in started.server.metrics.text()


@pytest.mark.parametrize("field", ["rows", "encoding", "dtype"])
def test_reusing_a_request_id_for_a_different_question_is_refused(monkeypatch, field):
    changed = {
        "rows": TokenBatch(*(tensor[:1] for tensor in padded_rows())),
        "encoding": "probs",
        "dtype": "float16",
    }[field]
    extra = {"vocabulary": torch.tensor([1, 2])} if field == "encoding" else {}
    with running() as started:
        gate = Held(started, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(call, started, "/v1/generate", question())
            assert gate.begun.acquire(timeout=20)
            status, message = error(started, **{field: changed}, **extra)
            assert status == 400
            assert "under way with another question" in message
            repeated = pool.submit(call, started, "/v1/generate", question())
            wait_for(lambda: "fledge_pending_requests 2" in started.server.metrics.text())
            gate.go.set()
            assert first.result()[2] == repeated.result()[2]
        assert gate.calls == 1


# --- sizes, hosts, tokens, keys, exits ------------------------------------------------------------

FIELDS = ["input_ids", "attention_mask", "loss_mask", "position_ids", "seq_lens", "doc_remaining"]
FACTS = {"protocol": "1", "request_id": "0" * 32, "encoding": "hidden", "dtype": "auto"}


def tensors():
    ids = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32)
    ones, length = torch.ones_like(ids), torch.tensor([[4]], dtype=torch.int32)
    positions = torch.arange(4, dtype=torch.int32)[None]
    values = (ids, ones, ones, positions, length, positions.flip(1))
    return dict(zip(FIELDS, values, strict=True))


@given(
    st.sampled_from([*FIELDS, "vocabulary"]),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([torch.int32, torch.uint8, torch.int64, torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_tensors_of_wrong_sizes_are_400(server, field, shape, dtype):
    assert call(server, "/v1/generate", Message(tensors(), FACTS).to_bytes())[0] == 200
    fields = {**tensors(), field: torch.ones(shape, dtype=dtype)}
    good = field != "vocabulary" and shape == list(tensors()[field].shape)
    good = good or (field == "vocabulary" and len(shape) == 1 and shape[0] > 0)
    if good and not dtype.is_floating_point:
        return  # its sizes are right
    status, _, data = call(server, "/v1/generate", Message(fields, FACTS).to_bytes())
    assert status == 400, data
    message = json.loads(data)["error"]
    assert field in message or field == "input_ids"  # the others are compared with it
    assert "\n" not in message


def raw_get(port, host, path="/v1/info"):
    with connect(port) as raw:
        line = b"" if host is None else b"Host: " + host.encode() + b"\r\n"
        raw.sendall(f"GET {path} HTTP/1.1\r\n".encode() + line + b"Connection: close\r\n\r\n")
        reply = b""
        while piece := raw.recv(1 << 16):
            reply += piece
    return int(reply.split()[1]), reply


def test_without_a_token_only_local_host_names_are_answered(server):
    for host in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]"):
        for port in ("", f":{server.port}", ":9000"):  # forwarded, as ssh -L does
            assert raw_get(server.port, host + port)[0] == 200
    strangers = ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "evil.example:8700")
    for host in (*strangers, "", "127.0.0.1:80:80", "[::1]evil", "localhost@evil", None):
        status, reply = raw_get(server.port, host)
        assert status in (400, 421), host
        assert b"evil" not in reply
        assert b"weights_fingerprint" not in reply
    assert raw_get(server.port, "balancer.example", "/health")[0] == 200
    twice = f"localhost\r\nHost: evil.example:{server.port}"
    assert raw_get(server.port, twice)[0] in (400, 421)


@pytest.mark.parametrize(
    "token",
    ["", " ", "gehe\u00efm", "two words", "a\tb", "line\nbreak", "\x7f", "\u2603", "a\x00b"],
)
def test_malformed_tokens_are_refused_in_one_line(monkeypatch, token, server):
    if "\x00" not in token:  # no environment variable can hold it
        monkeypatch.setenv("ODD", token)
        with pytest.raises(BadInput, match="ODD"):
            token_from("ODD")
    with pytest.raises(BadInput, match="token"):
        RemoteEagle3TargetModel(server.url, token=token, wait_s=0.5)
    with pytest.raises(BadInput, match="token"):
        running(token=token).__enter__()


def test_an_encrypted_key_is_refused_without_a_prompt(certificate, tmp_path):
    cert, key = certificate
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", key, "-out", locked, "-aes128", "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(BadInput, match=r"locked.pem: the key is encrypted.*openssl pkey"):
        Address(tls_cert=cert, tls_key=locked).check(token="t", insecure=False)
    Address(tls_cert=cert, tls_key=key).check(token="t", insecure=False)
    if os.geteuid():  # root may read everything
        locked.chmod(0)
        with pytest.raises(BadInput, match="no certificate chain"):
            Address(tls_cert=cert, tls_key=locked).check(token="t", insecure=False)


def stalled(port, count):
    connections = []
    for _ in range(count):
        raw = connect(port)
        raw.sendall(head(1000) + b"x")
        connections.append(raw)
    half_open = connect(port)
    return [*connections, half_open]


def test_a_second_interrupt_leaves_no_traceback(nursery, tmp_path):
    pid, port = nursery.start(drain_s=60.0, stderr=str(tmp_path / "stderr"))
    waiting = stalled(port, 3)
    wait_for(lambda: b"fledge_pending_requests 3" in raw_get(port, "localhost", "/metrics")[1])
    os.kill(pid, signal.SIGINT)
    wait_for(lambda: not listening(port))
    os.kill(pid, signal.SIGINT)
    begin = time.monotonic()
    wait_for(lambda: not alive(pid))
    assert time.monotonic() - begin < 5
    assert (tmp_path / "stderr").read_text() == ""
    assert all(raw.recv(100).startswith(b"HTTP/1.1 503 ") for raw in waiting[:3])
    for raw in waiting:
        raw.close()


@pytest.mark.parametrize("drain_s", [0.0, 1.5])
def test_stalled_bodies_delay_the_exit_by_no_more_than_the_drain(nursery, drain_s):
    pid, port = nursery.start(drain_s=drain_s)
    waiting = stalled(port, 5)
    wait_for(lambda: b"fledge_pending_requests 5" in raw_get(port, "localhost", "/metrics")[1])
    os.kill(pid, signal.SIGTERM)
    begin = time.monotonic()
    wait_for(lambda: not alive(pid))
    assert drain_s - 0.5 < time.monotonic() - begin < drain_s + 2.5
    for raw in waiting:
        raw.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
