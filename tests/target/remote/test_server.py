"""The server's edge cases: who may ask, what is refused, and that it keeps running."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.remote.client import RemoteEagle3TargetModel, token_from
from fledge.target.remote.server.run import Address
from fledge.target.remote.wire import Message
from target.contract import packed_rows, padded_rows, some_documents
from target.remote.servers import (
    Held,
    Running,
    answers,
    call,
    health,
    listening,
    question,
    running,
    wait_for,
)


def test_a_wrong_token_is_401_and_the_right_one_is_accepted():
    with running(token="secret") as started:
        for path, body in (("/v1/info", None), ("/v1/generate", question())):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                status, _, data = call(started, path, body, headers=headers)
                assert status == 401
                assert "token" in json.loads(data)["error"]
        assert call(started, "/health")[0] == 200  # for load balancers
        right = {"Authorization": "Bearer secret"}
        assert call(started, "/v1/generate", question(), headers=right)[0] == 200
        with RemoteEagle3TargetModel(started.url, token="secret") as target:
            target.generate_batch(*padded_rows())
        with pytest.raises(BadInput, match=r"token is needed; see target\.token_env"):
            RemoteEagle3TargetModel(started.url, token="wrong", wait_s=1.0)


def malformed():
    good = bytearray(question())
    yield "empty", b""
    yield "noise", os.urandom(5000)
    yield "cut", bytes(good[:-50])
    flipped = bytearray(good)
    flipped[-100] ^= 4
    yield "flipped", bytes(flipped)
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
    wide = torch.ones(1, 65, dtype=torch.long)  # the tiny target's context is 64
    yield "long row", question(rows=TokenBatch(wide, wide, wide))
    yield "long document", question(rows=TokenBatch(*packed_rows([[[5] * 65, [6] * 10]], 80)))
    many = torch.ones(8, 50, dtype=torch.long)
    yield "many tokens", question(rows=TokenBatch(many, many, many))


def test_malformed_questions_are_400_in_one_line_and_the_server_keeps_running():
    with running(max_tokens=300) as server:
        for name, body in malformed():
            status, _, data = call(server, "/v1/generate", body)
            assert status == 400, name
            error = json.loads(data)["error"]
            assert error, name
            assert "\n" not in error
        rows = TokenBatch(*packed_rows([[[5] * 60, [6] * 10]], 80))  # packed: documents count
        assert call(server, "/v1/generate", question(rows=rows))[0] == 200
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
    assert call(server, "/v1/generate")[0] == 404  # a GET
    assert answers(server)
    assert capfd.readouterr().err == ""  # nobody can fill the log


def test_a_question_for_other_weights_is_409(server):
    status, _, data = call(server, "/v1/generate", question(fingerprint="f" * 16))
    assert status == 409
    assert "this server holds" in json.loads(data)["error"]
    assert answers(server)


def test_a_full_queue_is_429_and_the_client_retries(monkeypatch):
    with running(max_requests=2) as started:
        gate = Held(started, monkeypatch)
        with ThreadPoolExecutor(3) as pool:
            first = [pool.submit(call, started, "/v1/generate", question()) for i in range(2)]
            wait_for(lambda: health(started)["queue"] == 2)
            assert call(started, "/v1/generate", question())[0] == 429
            with RemoteEagle3TargetModel(started.url, timeout_s=30) as target:
                late = target.generate_batch_async(*padded_rows())
                wait_for(lambda: "are waiting already" in target._fleet._why())
                gate.go.set()
                late.result(timeout=30)
            assert [future.result()[0] for future in first] == [200, 200]
        assert health(started)["queue"] == 0


def test_questions_of_a_disconnected_client_are_not_computed(monkeypatch):
    with running() as started:
        gate = Held(started, monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(call, started, "/v1/generate", question())
            assert gate.begun.acquire(timeout=20)
            connection = http.client.HTTPConnection("127.0.0.1", started.port)
            connection.request("POST", "/v1/generate", body=question())
            wait_for(lambda: health(started)["queue"] == 2)
            connection.close()
            wait_for(lambda: health(started)["queue"] == 1)
            gate.go.set()
            assert first.result()[0] == 200
        assert gate.calls == 1
        assert answers(started)


def test_what_several_clients_ask_is_computed_once(monkeypatch):
    rows = TokenBatch(*packed_rows(some_documents(), 14))
    with running() as started:
        gate = Held(started, monkeypatch)
        gate.go.set()
        for name, times in (("a", 2), ("b", 3), ("a", 1)):
            body = question(request_id=name * 32, rows=rows, askers=3)
            replies = {call(started, "/v1/generate", body)[2] for _ in range(times)}
            assert len(replies) == 1
        assert gate.calls == 2
        assert not started.server.queue._shared  # all have asked


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


def test_stopping_finishes_accepted_requests(monkeypatch):
    started = Running(drain_s=20)
    gate = Held(started, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, started, "/v1/generate", question()) for _ in range(3)]
        wait_for(lambda: health(started)["queue"] == 3)
        started.web.should_exit = True
        wait_for(lambda: not listening(started.port))
        gate.go.set()
        assert [future.result()[0] for future in calls] == [200, 200, 200]
    started.stop()


def test_serving_a_network_needs_a_token_or_insecure():
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(BadInput, match="can be reached from other machines"):
            Address(host).check(token=None, insecure=False)
        Address(host).check(token="x", insecure=False)
        Address(host).check(token=None, insecure=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        Address(host).check(token=None, insecure=False)


def test_a_busy_port_is_reported_in_one_line(server):
    with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{server.port}"):
        Address(port=server.port).bind()


def test_tokens_come_from_the_environment(monkeypatch, server):
    monkeypatch.setenv("MY_TOKEN", " abc \n")
    assert token_from("MY_TOKEN") == "abc"
    assert token_from(None) is None
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(BadInput, match="MY_TOKEN holds no token"):
        token_from("MY_TOKEN")
    for token in ("two words", "line\nbreak", "gehe\u00efm"):
        with pytest.raises(BadInput, match="token"):
            RemoteEagle3TargetModel(server.url, token=token, wait_s=0.5)


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
