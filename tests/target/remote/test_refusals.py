"""One-line refusals of wrong tensor sizes, foreign hosts, malformed tokens and encrypted keys; and
clean exits."""

import json
import os
import signal
import socket
import subprocess
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.errors import BadInput
from fledge.target.remote.client import RemoteEagle3TargetModel, token_from
from fledge.target.remote.server.run import Address
from fledge.target.remote.wire import Message
from target.remote.servers import call, listening, running, wait_for

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
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
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
        raw = socket.create_connection(("127.0.0.1", port), 10)
        raw.sendall(
            b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx"
        )
        connections.append(raw)
    half_open = socket.create_connection(("127.0.0.1", port), 10)
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
