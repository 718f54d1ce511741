"""Real vLLM servers, started as users would: by `fledge serve --run`, or without fledge."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import fledge
from fledge.bench.server import parse_counters

_READY = "Application startup complete"
_FINISHED = re.compile(r"^vllm:request_success_total\{[^}]*\} (\S+)$", re.MULTILINE)
_COUNTED_S = 30.0
_PLUGIN = Path(__file__).parent / "mended_sampling"


@dataclass(frozen=True)
class Reply:
    """The tokens of a reply, and what vLLM reports to have drafted and accepted in each round."""

    tokens: list[int]
    drafted: list[int]
    accepted: list[int]


@dataclass
class Server:
    url: str
    log: list[str] = field(default_factory=list)  # its lines, newest last

    def ask(self, prompt: Sequence[int], *, new_tokens: int, **sampling: Any) -> Reply:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **sampling,
        }
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        reply = response.json()
        rounds = reply["metrics"]["speculative_decoding"]
        tokens = reply["choices"][0]["token_ids"]
        return Reply(tokens, rounds["per_step_drafted"], rounds["per_step_accepted"])

    def ask_all(
        self, seeds: Sequence[int], prompts: Sequence[Sequence[int]], **options: Any
    ) -> list[Reply]:
        """Send all prompts at once."""

        def ask(seed: int, prompt: Sequence[int]) -> Reply:
            return self.ask(prompt, seed=seed, **options)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, seeds, prompts))

    @property
    def model(self) -> str:
        [model] = httpx.get(f"{self.url}/v1/models").json()["data"]
        return str(model["id"])

    def finished(self) -> int:
        return _finished(self._metrics())

    def counters(self, finished: int) -> dict[str, float]:
        """vLLM's own counters, once they include `finished` requests: a reply may arrive a moment
        earlier."""
        deadline = time.monotonic() + _COUNTED_S
        while _finished(text := self._metrics()) < finished:
            assert time.monotonic() < deadline, "requests are missing in /metrics"
        return parse_counters(text)

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics").text


def _finished(metrics: str) -> int:
    return int(sum(float(value) for value in _FINISHED.findall(metrics)))


def serving(export: Path, target: Path, *flags: str) -> AbstractContextManager[Server]:
    """Serve an export as `fledge serve` starts it."""
    port = _free_port()
    command = ["-m", "fledge", "serve", str(export), "--run", "--target", str(target)]
    return _running([*command, "--host", "127.0.0.1", "--port", str(port), "--", *flags], port)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _running(arguments: list[str], port: int) -> Iterator[Server]:
    """Start a server and wait until it is ready; stop it and all its processes afterwards."""
    command = [sys.executable, *arguments]
    # as in a user's shell: without the settings of tests that run vLLM in their own process
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(Path(fledge.__file__).parents[1]), str(_PLUGIN)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = subprocess.Popen(
        command, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}")
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.log.append(line)
            if _READY in line:
                ready.set()
        ready.set()  # the process has ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait()
        assert process.poll() is None, "".join(server.log[-40:])
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(10)
