"""A real llama.cpp server in a process of its own, and what it answers and counts."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("LLAMACPP_PYTHON", HERE.parents[2] / ".venv-llamacpp/bin/python"))


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    drafted: int  # tokens that were verified
    accepted: int


@dataclass(frozen=True)
class Server:
    url: str

    def answer(self, prompt_ids: Sequence[int], new_tokens: int) -> Answer:
        asked = {
            "prompt": list(prompt_ids), "n_predict": new_tokens, "temperature": 0.0, "top_k": 1,
            "return_tokens": True, "cache_prompt": False, "samplers": ["top_k"],
        }  # fmt: skip
        reply = self.ask("/completion", asked)
        timings = reply["timings"]
        return Answer(
            reply["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        )

    def rounds(self) -> int:
        """Passes of the target that verified drafted tokens, over all requests."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            lines = dict(line.rsplit(" ", 1) for line in reply.read().decode().splitlines())
        return int(float(lines["llamacpp:spec_decode_num_drafts_total"]))

    def ask(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())


@contextmanager
def serve(**asked: Any) -> Iterator[Server]:
    """`asked`: what `server_process.py` reads."""
    command = [str(ENVIRONMENT), str(HERE / "server_process.py"), json.dumps(asked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdin is not None
        assert it.stdout is not None
        lines: list[str] = []
        for line in it.stdout:
            lines.append(line)
            if line.startswith("http"):
                break
        else:
            raise RuntimeError("llama.cpp did not start:\n" + "".join(lines[-20:]))
        try:
            yield Server(line.strip())
        finally:
            it.kill()
