"""The server's edge cases: who may ask, what is refused, and that it keeps running."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.remote.client import RemoteEagle3TargetModel, token_from
from fledge.target.remote.server.run import Address
from fledge.target.remote.wire import Message
from target.contract import assert_same, packed_rows, padded_rows, some_documents
from target.remote.servers import (
    Held,
    Limits,
    Running,
    answers,
    call,
    expected,
    listening,
    question,
    running,
    wait_for,
)


def test_a_wrong_token_is_401_and_the_right_one_is_accepted():
    with running(token="secret") as started:
        for path, body in (("/v1/info", None), ("/metrics", None), ("/v1/generate", question())):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                status, reply_headers, data = call(started, path, body, headers=headers)
                assert status == 401
                assert reply_headers["WWW-Authenticate"] == "Bearer"
                assert "token" in json.loads(data)["error"]
        assert call(started, "/health")[0] == 200  # for load balancers
        right = {"Authorization": "Bearer secret"}
        assert call(started, "/v1/info", headers={"Host": "gpu1", **right})[0] == 200
        assert call(started, "/v1/generate", question(), headers=right)[0] == 200
        with RemoteEagle3TargetModel(started.url, token="secret") as target:
            target.generate_batch(*padded_rows())
        with pytest.raises(BadInput, match=r"token is needed; see target\.token_env"):
            RemoteEagle3TargetModel(started.url, token="wrong", wait_s=1.0)


def test_large_bodies_are_413_and_the_server_keeps_running():
    with running(limits=Limits(max_body_bytes=20_000, max_tokens=40)) as started:
        status, _, data = call(
            started, "/v1/generate", headers={"Content-Length": str(10**12)}, method="POST"
        )
        assert status == 413
        assert "20000 are allowed" in json.loads(data)["error"]
        assert call(started, "/v1/generate", b"x" * 20_001)[0] == 413
        wide = torch.ones(1, 41, dtype=torch.long)
        assert call(started, "/v1/generate", question(rows=TokenBatch(wide, wide, wide)))[0] == 413
        assert answers(started)


def garbage():
    good = bytearray(question())
    yield "empty", b""
    yield "noise", os.urandom(5000)
    yield "cut", bytes(good[:-50])
    flipped = bytearray(good)
    flipped[-100] ^= 4
    yield "flipped", bytes(flipped)
    yield "pickle", b"\x80\x04\x95\x10" + b"\0" * 50
    yield "no rows", Message({}, {"protocol": "1", "request_id": "0" * 32}).to_bytes()
    yield "old protocol", Message({}, {"protocol": "0"}).to_bytes()
    ids, mask, loss = padded_rows()
    yield "ids", question(rows=TokenBatch(ids + 1000, mask, loss))
    yield "negative", question(rows=TokenBatch(ids - 99, mask, loss))
    yield "nothing", question(rows=TokenBatch(ids, mask * 0, loss))
    yield "encoding", question(encoding="logits")
    yield "dtype", question(dtype="int8")
    yield "no vocabulary", question(encoding="probs")
    yield "vocabulary", question(encoding="probs", vocabulary=torch.tensor([1, 97]))
    yield "twice", question(encoding="probs", vocabulary=torch.tensor([1, 1]))
    yield "top_k", question(encoding="topk", vocabulary=torch.tensor([1, 2]), top_k=3)
    yield "id", question(request_id="x")
    packed = packed_rows(some_documents(), 14)
    many = torch.zeros(3, 1000, dtype=torch.long)
    many[:, :3] = packed[4]
    yield "documents", question(rows=TokenBatch(*packed[:4], many, packed[5]))


def test_garbage_is_400_in_one_line_and_the_server_keeps_running(server):
    for name, body in garbage():
        status, _, data = call(server, "/v1/generate", body)
        assert status == 400, name
        error = json.loads(data)["error"]
        assert error, name
        assert "\n" not in error
    assert answers(server)


def test_invalid_http_and_unknown_routes_do_no_harm(server, capfd):
    for noise in (
        b"\0\1\2\3\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/generate HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw:
            raw.sendall(noise)
    assert call(server, "/v2/info")[0] == 404
    assert call(server, "/docs")[0] == 404
    assert "/v2/info" not in server.server.metrics.text()
    assert call(server, "/v1/generate")[0] == 405
    assert answers(server)
    assert capfd.readouterr().err == ""  # nobody can fill the log


def test_a_question_for_other_weights_is_409(server):
    status, _, data = call(server, "/v1/generate", question(fingerprint="f" * 16))
    assert status == 409
    assert "this server holds" in json.loads(data)["error"]
    assert answers(server)


def test_a_full_queue_is_429_with_retry_after_and_the_client_retries(monkeypatch):
    with running(limits=Limits(max_requests=2)) as started:
        gate = Held(started, monkeypatch)
        with ThreadPoolExecutor(3) as pool:
            first = [
                pool.submit(call, started, "/v1/generate", question(request_id=f"{i}" * 32))
                for i in range(2)
            ]
            wait_for(lambda: "fledge_pending_requests 2" in started.server.metrics.text())
            status, headers, data = call(started, "/v1/generate", question(request_id="9" * 32))
            assert status == 429
            assert 1 <= int(headers["Retry-After"]) <= 30
            assert "full" in json.loads(data)["error"]
            assert 0 < json.loads(data)["retry_after_s"] <= int(headers["Retry-After"])
            with RemoteEagle3TargetModel(started.url, timeout_s=30) as target:
                late = target.generate_batch_async(*padded_rows())
                wait_for(lambda: 'status="429"} 2' in started.server.metrics.text())
                gate.go.set()
                late.result(timeout=30)
            assert [future.result()[0] for future in first] == [200, 200]
        assert "fledge_pending_requests 0" in started.server.metrics.text()


def test_pending_replies_are_bounded_in_bytes_too(monkeypatch):
    with running(limits=Limits(max_reply_bytes=30_000)) as started:  # one answer is 21 kB
        gate = Held(started, monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(call, started, "/v1/generate", question())
            assert gate.begun.acquire(timeout=20)
            assert call(started, "/v1/generate", question(request_id="9" * 32))[0] == 429
            gate.go.set()
            assert first.result()[0] == 200
        assert answers(started)  # there is room again


def test_requests_of_a_disconnected_client_are_not_computed(monkeypatch):
    with running() as started:
        gate = Held(started, monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(call, started, "/v1/generate", question())
            assert gate.begun.acquire(timeout=20)
            connection = http.client.HTTPConnection("127.0.0.1", started.port)
            connection.request("POST", "/v1/generate", body=question(request_id="7" * 32))
            wait_for(lambda: "fledge_queue_requests 1" in started.server.metrics.text())
            connection.close()
            wait_for(lambda: "fledge_abandoned_total 1" in started.server.metrics.text())
            gate.go.set()
            assert first.result()[0] == 200
        assert gate.calls == 1
        assert answers(started)


def test_an_error_inside_the_target_is_500_and_the_server_keeps_running(monkeypatch):
    with running() as started:
        backend = started.server.target.backend
        with monkeypatch.context() as patch:

            def broken(*args):
                raise RuntimeError("CUDA out of memory\nand much more")

            patch.setattr(backend, "answer", broken)
            status, _, data = call(started, "/v1/generate", question())
        assert status == 500
        assert json.loads(data)["error"] == "the target failed (RuntimeError: CUDA out of memory)"
        assert answers(started)
        assert "fledge_failed_passes_total 1" in started.server.metrics.text()


def test_stopping_finishes_accepted_requests(monkeypatch):
    started = Running(drain_s=20)
    gate = Held(started, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(call, started, "/v1/generate", question(request_id=f"{i}" * 32))
            for i in range(3)
        ]
        wait_for(lambda: "fledge_pending_requests 3" in started.server.metrics.text())
        started.web.should_exit = True
        wait_for(lambda: not listening(started.port))
        gate.go.set()
        assert [future.result()[0] for future in calls] == [200, 200, 200]
    started.stop()


def test_metrics_can_be_read(server):
    assert answers(server)
    status, headers, data = call(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    for line in data.decode().splitlines():
        name, _, value = line.rpartition(" ")
        assert line.startswith("# ") or (name.startswith("fledge_") and float(value) >= 0)
    assert 'fledge_http_requests_total{path="/v1/generate",status="200"}' in data.decode()


def test_serving_a_network_needs_a_token_or_insecure():
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(BadInput, match="can be reached from other machines"):
            Address(host).check(token=None, insecure=False)
        Address(host).check(token="x", insecure=False)
        Address(host).check(token=None, insecure=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        Address(host).check(token=None, insecure=False)
    with pytest.raises(BadInput, match="belong together"):
        Address(tls_cert=Path("x")).check(token=None, insecure=False)
    with pytest.raises(BadInput, match="no certificate chain"):
        Address(tls_cert=Path("no"), tls_key=Path("no")).check(token=None, insecure=False)


def test_a_busy_port_is_reported_in_one_line(server):
    with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{server.port}"):
        Address(port=server.port).bind()


def test_tokens_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", " abc \n")
    assert token_from("MY_TOKEN") == "abc"
    assert token_from(None) is None
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(BadInput, match="MY_TOKEN holds no token"):
        token_from("MY_TOKEN")


def test_tls(certificate):
    cert, key = certificate
    with running(address=Address(port=0, tls_cert=cert, tls_key=key), token="t") as started:
        assert started.url.startswith("https://")
        options = {"token": "t", "wait_s": 1.0}
        with RemoteEagle3TargetModel(started.url, ca_file=str(cert), **options) as target:
            batch = target.generate_batch(*padded_rows())
        assert_same(batch, expected())
        with pytest.raises(BadInput, match=r"TLS failed .*ca_file"):
            RemoteEagle3TargetModel(started.url, **options)


def test_the_command_serves_drains_and_exits_with_code_0(tiny_target, tmp_path):
    command = [sys.executable, "-m", "fledge", "serve-target", "--target", str(tiny_target)]
    command += ["--aux-layer-ids", "0,1,2", "--port", "0", "--json", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["aux_layer_ids"] == [0, 1, 2]
        with RemoteEagle3TargetModel(facts["url"]) as target:
            target.generate_batch(*padded_rows())
            target.fetch_files(tmp_path / "files")
        names = {path.name for path in (tmp_path / "files").iterdir()}
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= names
        for path in (tmp_path / "files").iterdir():
            assert path.read_bytes() == (tiny_target / path.name).read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


def test_bad_options_exit_with_code_2(tiny_target, monkeypatch):
    from fledge.cli.main import run

    monkeypatch.setenv("ODD_TOKEN", "two words")
    monkeypatch.setenv("NO_TOKEN", "")
    options = ("--engine hff", "--aux-layer-ids a,b", "--host 0.0.0.0", "--engine-arg x")
    for words in (*options, "--token-env ODD_TOKEN", "--token-env NO_TOKEN", "--target /nowhere"):
        with pytest.raises(SystemExit) as ended:
            run(["serve-target", "--port", "0", "--target", str(tiny_target), *words.split()])
        assert ended.value.code == 2, words
