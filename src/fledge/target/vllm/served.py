"""A running `vllm serve` with vLLM's hidden-state connector as the target.

Rows are sent as prompts of token ids over its OpenAI interface, each with one token to generate;
the response names the file that holds the states. Only the last part of that path is used: the file
is looked up in a directory that this process can read, which the server may see under another path.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.core.reading import ListOf, Table, Text, Whole, check
from fledge.target.remote.http import Server, ServerFault
from fledge.target.vllm.connector import ConnectorRunner, serve_flags
from fledge.target.vllm.engine import Captured, take_states

T = TypeVar("T")
_MAX_IN_FLIGHT = 64  # requests: vLLM batches them
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between two checks for a file
_RETRY_EVERY_S = 1.0  # between two attempts to reach the server
_SAMPLING: dict[str, Any] = {  # overrides defaults of the model's files and the server's flags
    "max_tokens": 1,
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "return_token_ids": True,
}
_MODELS = Table({"data": ListOf(Table({"id": Text(), "max_model_len": Whole(1)}), least=1)})
_ANSWER = Table(
    {
        "choices": ListOf(Table({"token_ids": ListOf(Whole(0), least=1)}), least=1),
        "kv_transfer_params": Table({"hidden_states_path": Text()}),
    }
)


class ServedRunner(ConnectorRunner):
    """A running `vllm serve`; several clients may use it at the same time."""

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        url: str,
        shared_dir: str | PathLike[str] | None = None,
        token: str | None = None,
        timeout_s: float = 120.0,
        dtype: torch.dtype | str | None = None,
        trust_remote_code: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Connect to a server. `model` names the files of the model that it runs. Its precision and
        layers were fixed when it was started, and are checked against those requested."""
        if shared_dir is None or not Path(shared_dir).is_dir():
            raise BadInput(
                f"{shared_dir} is not a directory",
                where="target.shared_dir",
                fix="name the shared_storage_path of the server's connector, as seen from here",
            )
        super().__init__(model, dtype=dtype, trust_remote_code=trust_remote_code, device=device)
        address = url.rstrip("/").removesuffix("/v1")
        self._server = Server(address, token=token, content_type="application/json")
        self._shared_dir, self._timeout_s = Path(shared_dir), timeout_s
        self._facts: dict[str, Any] = {}  # about the served model
        self._pool = ThreadPoolExecutor(_MAX_IN_FLIGHT, "fledge-vllm-row")
        self._closed = threading.Event()  # ends all waiting

    def close(self) -> None:
        self._closed.set()
        self._server.close()
        self._pool.shutdown()

    def _ensure_running(self, vllm_ids: list[int]) -> None:
        ask = partial(self._server.get_json, "/v1/models", _MODELS)
        self._facts = self._retry(lambda left_s: ask(timeout_s=left_s))["data"][0]

    def _longest(self) -> int:
        return int(self._facts["max_model_len"])

    def _how_to_match(self) -> str:
        flags = serve_flags(self._ids, self._shared_dir)
        return f"is target.model what it serves? Started with: vllm serve MODEL {flags}"

    def _capture(self, rows: Sequence[list[int]]) -> Iterator[Captured]:
        futures = [
            self._pool.submit(self._ask, row, tokens) for row, tokens in enumerate(rows) if tokens
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def _ask(self, row: int, tokens: list[int]) -> Captured:
        question = {"model": self._facts["id"], "prompt": tokens, **_SAMPLING}
        body = json.dumps({**question, "cache_salt": uuid.uuid4().hex}).encode()

        def post(left_s: float) -> dict[str, Any]:
            return self._server.get_json("/v1/completions", body=body, timeout_s=left_s)

        answer = self._retry(post)
        url = self._server.url
        if not answer.get("kv_transfer_params"):
            raise BadInput(
                "this vLLM returns no hidden states", where=url, fix=self._how_to_match()
            )
        check(answer, _ANSWER, where=url, what="the answer")
        path = PurePosixPath(answer["kv_transfer_params"]["hidden_states_path"])
        states_NKD = self._wait_for_states(self._shared_dir / path.name, tokens)
        return Captured(row, states_NKD, answer["choices"][0]["token_ids"][0])

    def _wait_for_states(self, path: Path, tokens: list[int]) -> Tensor:
        deadline, pause = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while (states_NKD := take_states(path, tokens)) is None:
            if self._closed.wait(pause) or time.monotonic() > deadline:
                raise BadInput(
                    f"no states in {path.name} after {self._timeout_s:g} s",
                    where=f"target.shared_dir {self._shared_dir}",
                    fix="it must be the shared_storage_path of the server's connector",
                )
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return states_NKD

    def _retry(self, request: Callable[[float], T]) -> T:
        """The server's answer to a request, repeated while it is busy or unreachable."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return request(max(left_s, 0.01))
            except ServerFault as error:
                if left_s <= _RETRY_EVERY_S or self._closed.wait(_RETRY_EVERY_S):
                    what = f"the vLLM server does not answer ({error})"
                    raise TargetUnreachable(
                        what, where=self._server.url, fix="see target.url and target.timeout_s"
                    ) from error
