"""What we ask llama.cpp's server, and what we read of its replies."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest

from fledge.core.errors import BadInput, MissingPackage
from fledge.decode import llamacpp
from fledge.decode.llamacpp import LlamaServer

# "A mother's": the first token of the prompt's pass, a round of 1 + 2, one of 1 + 0, one of 1 + 1
# of which the end cut the last. (token, ms, accepted so far)
STREAM = [(5, 0.001, 0), (6, 40, 2), (7, 40, 2), (8, 40, 2), (9, 70, 2), (2, 95, 3)]
METRICS = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 3
"""


def timings(ms, accepted, count):
    return {"predicted_ms": ms, "predicted_n": count, "draft_n": 9, "draft_n_accepted": accepted}


class Engine(BaseHTTPRequestHandler):
    asked: ClassVar[list] = []

    def do_GET(self):
        self._reply([METRICS])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["prompt"] == [0]:
            return self._reply(["{}"], status=400)
        tokens = [token for token, _, _ in STREAM]
        last = {"content": "", "stop": True, "stop_type": "eos", "timings": timings(95, 3, 6)}
        if not body["stream"]:
            return self._reply([json.dumps({**last, "content": "abc", "tokens": tokens})])
        events = [
            {"content": f"<{t}>", "tokens": [t], "stop": False, "timings": timings(ms, a, i + 1)}
            for i, (t, ms, a) in enumerate(STREAM)
        ]
        ends = [] if body["prompt"] == [1] else [{**last, "tokens": []}]
        return self._reply(f"data: {json.dumps(event)}\n\n" for event in [*events, *ends])

    def _reply(self, texts, status=200):
        self.send_response(status)
        self.end_headers()
        for text in texts:
            self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    Thread(target=engine.serve_forever, daemon=True).start()
    yield LlamaServer(f"http://127.0.0.1:{engine.server_port}/v1/")
    engine.shutdown()


def test_a_whole_answer_and_a_stream_say_the_same(server):
    whole = server.complete([3, 4], 20)
    assert (whole.token_ids, whole.text, whole.finish) == ([5, 6, 7, 8, 9, 2], "abc", "eos")
    assert (whole.tokens, whole.drafted, whole.accepted, whole.rounds) == (6, 9, 3, 2)
    assert whole.tokens_per_s == pytest.approx(5 / 0.095)
    assert (
        Engine.asked[-1] | {"prompt": [3, 4], "n_predict": 20, "temperature": 0} == Engine.asked[-1]
    )
    shown = []
    stream = server.complete([3, 4], 20, on_token=lambda *piece: shown.append(piece))
    for name in ("token_ids", "finish", "tokens", "drafted", "accepted", "rounds", "seconds"):
        assert getattr(stream, name) == getattr(whole, name), name
    assert stream.depths == [0, 1, 2, 0, 0, 1]
    assert stream.moments == [(1e-6, 1), (0.04, 4), (0.07, 5), (0.095, 6)]
    assert shown == list(zip(stream.pieces, stream.depths, strict=True))


def test_counters(server):
    assert server.counters() == {"spec_decode_num_drafts_total": 3.0}


def test_failures_are_one_line(server):
    with pytest.raises(BadInput, match="/completion answered 400"):
        server.complete([0], 1)
    with pytest.raises(BadInput, match="broke off"):
        server.complete([1], 1, on_token=lambda *piece: None)
    with pytest.raises(BadInput, match="is it running"):
        LlamaServer("http://127.0.0.1:9").counters()


def test_without_the_package_the_line_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(llamacpp, "is_installed", lambda module: False)
    with pytest.raises(MissingPackage, match=r"llama.cpp is not installed here; .*llama-cpp"):
        LlamaServer.start(tmp_path / "target.gguf")
