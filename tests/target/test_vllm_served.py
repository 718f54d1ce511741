"""The client of `vllm serve` with the hidden-state connector, tested with a fake server.
With the real one: tests/engines/vllm/test_vllm_connector.py."""

import fcntl
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import CHECKS, Case, padded_rows
from safetensors.torch import save_file
from tiny_models import tiny_model

import fledge
from fledge.core.batch import Supervision
from fledge.core.errors import BadInput, TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.target.kinds import kind_of
from fledge.target.vllm.kind import VllmTarget

LAYERS = [2, 4, 5, 8]  # vLLM's ids of layers 1, 3, 4 and the last
CPU = torch.device("cpu")


class FakeVllm:
    """transformers behind vLLM's HTTP API. `faults` are replies sent before the real ones."""

    def __init__(self, model: Any, shared_dir: Path) -> None:
        self.model, self.shared_dir, self.layers = model, shared_dir, list(LAYERS)
        self.faults: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[dict[str, Any]] = []
        self.extracts, self.next_token = True, -1
        handler = type("Handler", (_Handler,), {"vllm": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "tiny", "max_model_len": 64}]}

    @torch.no_grad()
    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        tokens = request["prompt"]
        states: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, args, out: states.append(out.clone()))
            for layer in self.model.model.layers
        ]
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        for hook in hooks:
            hook.remove()
        name = f"cmpl-{len(self.asked)}-{request['cache_salt']}.safetensors"
        hidden = torch.stack([states[layer - 1][0] for layer in self.layers], 1)
        self._write(name, {"hidden_states": hidden, "token_ids": torch.tensor(tokens)})
        token = int(logits.argmax()) if self.next_token < 0 else self.next_token
        params = {"hidden_states_path": f"/as/the/server/sees/it/{name}"}
        answer = {"choices": [{"token_ids": [token]}], "kv_transfer_params": params}
        return answer if self.extracts else {**answer, "kv_transfer_params": None}

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Like vLLM: lock the file first, write it in a thread after the reply is sent."""
        lock = (self.shared_dir / f"{name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            save_file(tensors, self.shared_dir / name)
            lock.close()

        threading.Timer(0.01, write).start()


class _Handler(BaseHTTPRequestHandler):
    vllm: FakeVllm
    protocol_version = "HTTP/1.1"
    running = threading.Lock()  # hooks on the model: one request at a time

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._reply(200, self.vllm.models())

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"  # vLLM refuses anything else
        request_json = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.running:
            if self.vllm.faults:
                self._reply(*self.vllm.faults.pop())
            else:
                self._reply(200, self.vllm.complete(request_json))

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


MODEL = tiny_model("llama")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(directory)
    return directory


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[FakeVllm]:
    server = FakeVllm(MODEL, tmp_path)
    yield server
    server.http.shutdown()
    server.http.server_close()


def opened(vllm: FakeVllm, files: Path, **more: Any) -> Any:
    fields = {"model": str(files), "url": vllm.url, "shared_dir": str(vllm.shared_dir), **more}
    section = VllmTarget.model_validate(fields)
    return kind_of(section).open(section, device=CPU, aux_layers=3)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any, vllm: FakeVllm, files: Path) -> None:
    def make(supervision: Supervision) -> Any:
        return opened(vllm, files, supervision=supervision)

    check(Case("vllm-served", MODEL, make, "hidden", rtol=1e-4, atol=1e-4))


def test_every_request_is_unique_and_leaves_no_files(vllm: FakeVllm, files: Path) -> None:
    """Equal prompts never share a prefix cache, and files are deleted once read."""
    ids, mask, loss = padded_rows()
    same = TokenBatch(ids[:1].repeat(4, 1), mask[:1].repeat(4, 1), loss[:1].repeat(4, 1))
    with opened(vllm, files) as target:
        batch = target.answer(same)
        assert target.supports_async
        assert target.answer_async(same).result(60).aux_hidden_states.equal(batch.aux_hidden_states)
    assert all(torch.equal(row, batch.aux_hidden_states[0]) for row in batch.aux_hidden_states)
    salts = [request["cache_salt"] for request in vllm.asked]
    assert len(set(salts)) == len(salts) == 2 + 4 + 4
    assert all(request["repetition_penalty"] == 1.0 for request in vllm.asked)
    assert list(vllm.shared_dir.iterdir()) == []


def test_temporary_faults_are_retried(vllm: FakeVllm, files: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fledge.target.vllm.served._RETRY_EVERY_S", 0.01)
    with opened(vllm, files) as target:
        expected = target.generate_batch(*padded_rows())
        vllm.faults = [(500, {}), (429, {"error": {"message": "full"}}), (503, {})]
        actual = target.generate_batch(*padded_rows())
        assert vllm.faults == []
        assert torch.equal(actual.aux_hidden_states, expected.aux_hidden_states)
        vllm.faults = [(400, {"error": {"message": "no such model", "code": 400}})]
        with pytest.raises(BadInput, match="no such model"):
            target.generate_batch(*padded_rows())
        monkeypatch.setattr(target.runner, "_timeout_s", 0.1)
        vllm.faults = [(500, {})] * 10**6
        with pytest.raises(TargetUnreachable, match="does not answer"):  # a run can be resumed
            target.generate_batch(*padded_rows())
        monkeypatch.setattr(target.runner, "_timeout_s", 120.0)
        waiting = target.answer_async(TokenBatch(*padded_rows()))
    with pytest.raises((BadInput, RuntimeError)):  # closing cancels it, started or not
        waiting.result(10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extracts": False}, r"no hidden states.*vllm serve MODEL --spec.*\[2, 4, 5, 8\]"),
        ({"layers": [2, 4, 8]}, r"3x32.*expected four layers of 32.*\[2, 4, 5, 8\]"),
        ({"layers": [2, 4, 5, 7]}, r"does not lead to the token.*is target\.model what it serves"),
        ({"next_token": 3}, "does not lead to the token"),
        ({"model": tiny_model("llama", seed=1)}, "does not lead to the token"),
    ],
    ids=str,
)
def test_a_server_that_does_not_match_the_section_is_refused(
    change: dict[str, Any], message: str, vllm: FakeVllm, files: Path
) -> None:
    for name, value in change.items():
        setattr(vllm, name, value)
    with pytest.raises(BadInput, match=message):
        opened(vllm, files)


def test_mistakes_in_the_section_are_explained(vllm: FakeVllm, files: Path) -> None:
    with pytest.raises(BadInput, match=r"float32.*float16 was asked for"):
        opened(vllm, files, dtype="float16")
    with pytest.raises(BadInput, match=r"target\.shared_dir.*shared_storage_path"):
        opened(vllm, files, shared_dir=str(vllm.shared_dir / "elsewhere"))
    other = vllm.shared_dir / "other"
    other.mkdir()
    with pytest.raises(BadInput, match=r"no states in cmpl-.*target\.shared_dir|shared_storage"):
        opened(vllm, files, shared_dir=str(other), timeout_s=0.1)
    with pytest.raises(BadInput, match=r"does not answer.*target\.url and"):
        opened(vllm, files, url="http://127.0.0.1:9", timeout_s=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "gpu1:8000", "shared_dir": "x"}, "must start with http"),
        ({"url": "http://gpu1:8000"}, "url needs shared_dir"),
        ({"url": "http://a", "shared_dir": "x", "tp_size": 2}, "starts here"),
    ],
    ids=str,
)
def test_conflicting_keys_are_refused(given: dict[str, Any], message: str) -> None:
    overrides = ["target.backend=vllm", *(f"target.{key}={value}" for key, value in given.items())]
    with pytest.raises(BadInput, match=message):
        fledge.load_recipe(None, overrides)
