"""The target inside vLLM: the draft learns from the very numbers that vLLM will serve.

States leave vLLM through its own connector (`connector`), whether the engine is started here or is
a running server (`served`). Every row or packed document is one request of a prompt and one token,
so padding is never computed. An engine started here lives in this process, one at a time.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Self, cast

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.target.runner import EngineEagle3TargetModel
from fledge.target.vllm import engine as engines
from fledge.target.vllm.connector import ConnectorRunner, connector_settings, layer_settings
from fledge.target.vllm.engine import Captured, StatesPlace, discard, take_states
from fledge.target.vllm.served import ServedRunner

_WRITTEN_S = 60.0  # how long states may take to appear after their request has finished


class VLLMTargetRunner(ConnectorRunner):
    """vLLM in this process, one engine at a time. It starts in `set_aux_layers`, with any number of
    layers."""

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        trust_remote_code: bool = False,
        shared_dir: str | PathLike[str] | None = None,
        device: torch.device | str | None = None,
        **engine_kwargs: Any,
    ) -> None:
        engines.require_vllm()
        engines.check_alone()
        fixed = {"skip_tokenizer_init": True, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        arguments = engines.with_fixed(engine_kwargs, fixed)
        arguments.setdefault("enforce_eager", True)  # prompts of any length, each run once
        arguments.setdefault("enable_prefix_caching", False)
        arguments |= {"dtype": engines.vllm_dtype(dtype), "trust_remote_code": trust_remote_code}
        super().__init__(model, trust_remote_code=trust_remote_code, device=device)
        self._engine_args = arguments
        self._place = StatesPlace(None if shared_dir is None else Path(shared_dir))
        self._engine: Any = None
        self._running: list[int] = []  # vLLM's ids of the layers that the engine captures
        self._request_numbers = count()

    @classmethod
    def build(cls, model: str | PathLike[str], **options: Any) -> Self:
        """Prepare a target by any name that `fledge.local_model` accepts.

        `dtype` None keeps the checkpoint's own. Options other than the constructor's are passed to
        vLLM's `EngineArgs` under their own names (`max_model_len`, `gpu_memory_utilization`,
        `quantization`, ...). Rows may be as long as the model and the engine's memory allow, unless
        `max_model_len` is less.
        """
        return cls(model, **options)

    def close(self) -> None:
        self._stop()
        self._place.remove()

    def _stop(self) -> None:
        if self._engine is not None:
            self._engine, self._running = None, []
            engines.stop()

    def _ensure_running(self, vllm_ids: list[int]) -> None:
        if self._running == vllm_ids:
            return
        self._stop()
        from vllm.platforms import current_platform

        capture = {
            "speculative_config": layer_settings(vllm_ids),
            "kv_transfer_config": connector_settings(
                self._place.make(), on_cpu=current_platform.is_cpu()
            ),
        }
        arguments = engines.with_fixed(self._engine_args, capture)
        self._engine = engines.start(self.directory, **arguments)
        self._running = vllm_ids

    def _longest(self) -> int:
        return cast(int, self._engine.model_config.max_model_len)

    def _quantization(self) -> str | None:
        method = self._engine_args.get("quantization")
        return super()._quantization() if method is None else str(method)

    def _capture(self, rows: Sequence[list[int]]) -> Iterator[Captured]:
        waiting: dict[str, int] = {}  # request id -> row
        written: dict[str, tuple[Path, int]] = {}  # request id -> file, next token
        try:
            for row, prompt, params in engines.requests(rows):
                request_id = str(next(self._request_numbers))
                self._engine.add_request(request_id, prompt, params)
                waiting[request_id] = row
            deadline = time.monotonic() + _WRITTEN_S
            while waiting:
                for output in self._engine.step():
                    if output.finished and output.request_id in waiting:
                        path = Path(output.kv_transfer_params["hidden_states_path"])
                        written[output.request_id] = path, output.outputs[0].token_ids[0]
                arrived = []
                for request_id, (path, next_token) in list(written.items()):
                    states_NKD = take_states(path, rows[waiting[request_id]])
                    if states_NKD is not None:
                        del written[request_id]
                        arrived.append(Captured(waiting.pop(request_id), states_NKD, next_token))
                yield from arrived
                # a request's states are written in a step after the one that finished it
                if arrived or self._engine.has_unfinished_requests():
                    deadline = time.monotonic() + _WRITTEN_S
                elif time.monotonic() > deadline:
                    raise RuntimeError(f"vLLM wrote no states for {len(waiting)} rows")
        finally:
            if waiting:
                self._engine.abort_request(list(waiting))
                for path, _ in written.values():
                    discard(path)


class VLLMEagle3TargetModel(EngineEagle3TargetModel):
    """EAGLE-3 target backend on its own vLLM engine, or on a running server.

    Beside the arguments common to all engines, `from_pretrained` takes `url` and `shared_dir` of a
    running `vllm serve`, and arguments of vLLM's `EngineArgs`.
    """

    runner: ConnectorRunner
    runner_type = VLLMTargetRunner
    _executor: ThreadPoolExecutor | None = None  # only with a server, which computes meanwhile

    @classmethod
    def _build(
        cls, model: str | PathLike[str], *, url: str | None = None, **options: Any
    ) -> ConnectorRunner:
        if url is not None:
            return ServedRunner(model, url=url, **options)
        return VLLMTargetRunner.build(model, **options)

    def _get_ready(self) -> None:
        self.overhead_tokens = 2**40  # padding is never run: as few calls as memory allows
        if isinstance(self.runner, ServedRunner):
            self.supports_async, self.prefetch = True, 2
            # one thread: batches are answered in order, the rows of each concurrently
            self._executor = ThreadPoolExecutor(1, "fledge-vllm")

    def answer_async(self, rows: TokenBatch) -> Future[Eagle3TargetBatch]:
        self._check_open()
        if self._executor is None:
            return super().answer_async(rows)
        return self._executor.submit(self.answer, rows)

    def close(self) -> None:
        if self._executor is not None and not self._closed:
            self.runner.close()  # ends the answer in progress
            self._executor.shutdown(cancel_futures=True)
        super().close()

    def _describe_weights(self) -> str:
        return self.runner.describe_weights()

    def _fingerprint_weights(self) -> str:
        return self.runner.weights_fingerprint()
