"""llama.cpp's server, in this process (package `xllamacpp`) or at an address: greedy answers token
by token, with the engine's own times and counters.

`xllamacpp` is optional and imported when a server is started. The server listens on a port of its
own choice and is asked over HTTP, so that one that runs elsewhere is asked in the same way.
"""

import contextlib
import http.client
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.core.addresses import server_address
from fledge.core.errors import BadInput, MissingPackage
from fledge.core.install import install_extra, is_installed
from fledge.core.machine import cpu_cores

PACKAGE, EXTRA = "xllamacpp", "llama-cpp"
_ERRORS_ONLY = 1  # verbosity
_TIMEOUT_S = 600.0
_COUNTER = re.compile(r"^llamacpp:(\w+) (\S+)$", re.MULTILINE)


@dataclass
class Answer:
    """A greedy answer; times and counts are llama.cpp's own (`timings`)."""

    token_ids: list[int]  # with the end token, if it ended so
    text: str
    finish: str  # "eos", "word" (a stop string), "limit"
    seconds: float  # after the first token, which the prompt's pass yields
    tokens: int
    drafted: int
    accepted: int
    # of a streamed answer, token by token: its text, and how far ahead the draft wrote it
    pieces: list[str] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    # and round by round: (seconds after the first token, tokens by then)
    moments: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / self.seconds if self.tokens > 1 else 0.0

    @property
    def rounds(self) -> int:
        """Passes of the target after the prompt's: each adds a token of its own to the accepted
        ones. (Those behind the end of the answer count too.)"""
        return max(0, self.tokens - 1 - self.accepted)


class LlamaServer:
    """A running server. As a context, it stops one that was started here."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._address = server_address(self.url)
        self._running: Any = None

    @classmethod
    def start(
        cls,
        model: Path,
        draft: Path | None = None,
        *,
        spec_type: str = "draft-eagle3",
        draft_tokens: int = 3,
        context: int = 4096,
        threads: int = 0,
        parallel: int = 1,
        host: str = "",
        port: int = 0,
    ) -> "LlamaServer":
        """Start one in this process. `spec_type` is as for `llama-server --spec-type`; `context` is
        shared by `parallel` requests at a time; 0 threads: one per core; 0: a free port."""
        engine = llama_cpp()
        params = engine.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(model), context, parallel
        params.cpuparams.n_threads = threads or cpu_cores()
        params.verbosity, params.endpoint_metrics, params.warmup = _ERRORS_ONLY, True, False
        params.model_alias = {model.stem}  # what clients and manifests see, not a path
        params.hostnames, params.port = [host or "127.0.0.1"], port
        if draft is not None:
            kind = f"COMMON_SPECULATIVE_TYPE_{spec_type.upper().replace('-', '_')}"
            params.speculative.types = [getattr(engine.common_speculative_type, kind)]
            params.speculative.draft.mparams.path = str(draft)
            params.speculative.draft.n_max = draft_tokens
        running, errors = _started(engine, params)
        where = str(draft or model)
        if running is None:
            raise BadInput(f"llama.cpp does not load it ({errors[0]})", where=where)
        server = cls(running.listening_address)
        server._running = running
        server.complete([0], 1)  # one that stops before its loop has begun would never stop
        if problem := next((text for text in errors if "speculative" in text), ""):
            server.close()  # it would run on without the draft
            raise BadInput(f"llama.cpp does not draft with it ({problem})", where=where)
        return server

    def __enter__(self) -> "LlamaServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop a server that was started here."""
        self._running = None

    def complete(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        on_token: Callable[[str, int], None] | None = None,
    ) -> Answer:
        """Answer greedily. The prompt is read anew, so that its pass does not depend on earlier
        requests. `on_token` gets the text and the depth of each token as it comes; of a character
        of several tokens, only the last is then in the answer's `token_ids`."""
        body = {
            "prompt": list(prompt_ids), "n_predict": max_new_tokens, "temperature": 0, "top_k": 1,
            "cache_prompt": False, "return_tokens": True,
            "stream": on_token is not None, "timings_per_token": True,
        }  # fmt: skip
        answer = Answer([], "", "", 0.0, 0, 0, 0)
        with self._ask("POST", "/completion", body) as response:
            if on_token is None:
                _end(answer, json.load(response))
                return answer
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if event["stop"]:
                        _end(answer, event)
                        return answer
                    _add(answer, event)
                    on_token(answer.pieces[-1], answer.depths[-1])
        raise BadInput("the server broke off its answer", where=self.url)

    def counters(self) -> dict[str, float]:
        """The counters and gauges of `/metrics`, without `llamacpp:`; among them
        `spec_decode_num_drafts_total`, `..._draft_tokens_total` and `..._accepted_tokens_total`."""
        with self._ask("GET", "/metrics") as response:
            found = _COUNTER.findall(response.read().decode())
        return {name: float(value) for name, value in found}

    @contextlib.contextmanager
    def _ask(
        self, verb: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        address = self._address
        kind = http.client.HTTPSConnection if address.scheme == "https" else None
        connection = (kind or http.client.HTTPConnection)(
            str(address.hostname), address.port, timeout=_TIMEOUT_S
        )
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(verb, address.path + path, payload)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read().decode(errors="replace")[:200]
                raise BadInput(f"{path} answered {response.status}: {text}", where=self.url)
            yield response
        except (OSError, http.client.HTTPException) as error:
            what = f"no answer ({type(error).__name__}: {error})"
            raise BadInput(what, where=self.url, fix="is it running?") from None
        finally:
            connection.close()


def _add(answer: Answer, event: dict[str, Any]) -> None:
    """Add one token of a stream. The counts of a round come with its first token."""
    times, accepted = event["timings"], event["timings"].get("draft_n_accepted", 0)
    now_s = times["predicted_ms"] / 1e3
    if not answer.moments or now_s > answer.moments[-1][0]:
        answer.depths.append(min(1, accepted - answer.accepted))
        answer.moments.append((now_s, len(answer.depths)))
        answer.drafted, answer.accepted = accepted - answer.accepted, accepted  # of the round
    else:
        ahead = answer.depths[-1] + 1
        answer.depths.append(ahead if ahead <= answer.drafted else 0)
        answer.moments[-1] = (now_s, len(answer.depths))
    answer.pieces.append(event["content"])
    answer.token_ids += event["tokens"]


def _end(answer: Answer, event: dict[str, Any]) -> None:
    """Complete an answer from its last event, or from the only one."""
    times = event["timings"]
    answer.text = "".join([*answer.pieces, event["content"]])
    answer.token_ids = answer.token_ids or event["tokens"]
    answer.finish, answer.tokens = event["stop_type"], times["predicted_n"]
    answer.seconds = times["predicted_ms"] / 1e3
    answer.drafted = times.get("draft_n", 0)
    answer.accepted = times.get("draft_n_accepted", 0)


def llama_cpp() -> Any:
    """The module, or the one line that says how to install it."""
    if not is_installed(PACKAGE):
        raise MissingPackage("llama.cpp is not installed here", fix=install_extra(EXTRA))
    import xllamacpp

    return xllamacpp


def _started(engine: Any, params: Any) -> tuple[Any, list[str]]:
    """The server (None: it does not start) and the errors that the native code wrote to standard
    error meanwhile."""
    running, failure = None, []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            running = engine.Server(params)
        except RuntimeError as error:
            failure = [str(error)]
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    errors = [line.partition(" E ")[2].partition(": ")[2] for line in lines if " E " in line]
    return running, errors + failure
