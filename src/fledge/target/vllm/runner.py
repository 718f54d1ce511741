"""The target inside vLLM: the draft learns from the very numbers that vLLM will serve.

`capture` selects how states leave the engine: through vLLM's own connector (`connector`, `served`),
or through our code inside its workers (`worker`), which needs no files and leaves head and norm to
vLLM, but is written for one version of it. This module has the second way, and the backend over all
of them.

Every row or packed document is one request of a prompt and one token, so padding is never computed.
The engine lives in this process, one at a time, in eager mode. With tensor parallelism its workers
are separate processes, and states are sent to this one's CPU memory.

Layer ids: ours name the layer whose *output* is meant; vLLM's count the layers that have run, so
our layer i is vLLM's i + 1, and the last layer needs no special case.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput, in_words
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.target.hf.embedding_and_head import UnknownEnds
from fledge.target.layers import EAGLE3_AUX_LAYERS, FinalNorm
from fledge.target.runner import EngineEagle3TargetModel
from fledge.target.vllm import engine as engines
from fledge.target.vllm.connector import ConnectorRunner, EngineConnectorRunner, layer_settings
from fledge.target.vllm.engine import Captured
from fledge.target.vllm.served import ServedRunner

log = logging.getLogger(__name__)

Capture = Literal["auto", "connector", "worker"]
_WORKER = "fledge.target.vllm.worker"
# Engine arguments on which capture depends; other values are rejected.
_FIXED: dict[str, Any] = {
    "enforce_eager": True,  # a compiled forward would have its aux layers baked in
    "enable_prefix_caching": False,  # it would return states of other layers
    "async_scheduling": False,
    "skip_tokenizer_init": True,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "worker_extension_cls": f"{_WORKER}.StatesExtension",
    "kv_transfer_config": {
        "kv_connector": "InMemoryStates",
        "kv_connector_module_path": _WORKER,
        "kv_role": "kv_producer",
    },
}
_MAX_IDLE_STEPS = 8


class VLLMTargetRunner:
    """A vLLM engine that returns states; created by `build`, one at a time in a process."""

    def __init__(
        self, engine: Any, directory: Path, num_aux_layers: int = EAGLE3_AUX_LAYERS
    ) -> None:
        """Wrap an engine that `build` started from the files in `directory`."""
        self._engine = engine
        self.directory = directory
        self._num_aux_layers = num_aux_layers  # how many the engine was started for
        self._order: list[int] = []  # the index of each aux layer among the returned states
        self.model: Any = self._model()

    @classmethod
    def build(
        cls,
        model: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        num_aux_layers: int = EAGLE3_AUX_LAYERS,
        **engine_kwargs: Any,
    ) -> Self:
        """Load a target by any name that `fledge.local_model` accepts.

        `dtype` None keeps the checkpoint's own. `engine_kwargs` are passed to vLLM's `EngineArgs`
        under their own names (`max_model_len`, `gpu_memory_utilization`, `quantization`, ...). Rows
        may be as long as the model and the engine's memory allow, unless `max_model_len` is less.
        The engine keeps the states of `num_aux_layers` layers, which `set_aux_layers` selects.
        """
        engines.check_version(engines.installed_version())
        engines.check_alone()
        # only the number of ids matters here: the aux layers' outputs and the head's input
        capture = layer_settings(range(num_aux_layers + 1))
        # copied: vLLM may modify its arguments
        fixed = {**deepcopy(_FIXED), "speculative_config": capture}
        arguments = engines.with_fixed(engine_kwargs, fixed)
        from fledge.models.resolve import local_model

        directory = local_model(str(model))
        engine = engines.start(directory, dtype=engines.vllm_dtype(dtype), **arguments)
        return cls(engine, directory, num_aux_layers)

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        if len(aux_layer_ids) != self._num_aux_layers:
            raise BadInput(
                f"this vLLM was built for {in_words(self._num_aux_layers)} aux layers, not for "
                f"{aux_layer_ids}",
                fix=f"VLLMTargetRunner.build(..., num_aux_layers={len(aux_layer_ids)})",
            )
        vllm_ids = [layer_id + 1 for layer_id in aux_layer_ids]
        self._call("fledge_capture", vllm_ids)
        self._order = [sorted(vllm_ids).index(layer_id) for layer_id in vllm_ids]  # vLLM sorts them

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, aux_BTD = self.forward_eagle3_hidden(input_ids, attention_mask)
        real_BT = attention_mask.bool().to(states_BTD.device)
        logits_NV: Tensor = self._call("fledge_logits", states_BTD[real_BT])
        logits_BTV = logits_NV.new_zeros((*real_BT.shape, logits_NV.shape[-1]))
        logits_BTV[real_BT] = logits_NV
        return logits_BTV, aux_BTD

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = engines.real_tokens(input_ids, attention_mask)
        engines.check_longest(rows, self._engine.model_config.max_model_len)
        return engines.assemble(self._capture(rows), input_ids, self._order)

    def input_embedding_weight(self) -> Tensor:
        return cast(Tensor, self._call("fledge_embedding"))

    def target_head(self) -> TargetHead:
        return cast(TargetHead, self._call("fledge_head"))

    def final_norm(self) -> FinalNorm | None:
        return cast(FinalNorm | None, self._call("fledge_final_norm"))

    def describe_weights(self) -> str:
        """The dtypes of the weights."""
        return str(self._call("fledge_dtypes"))

    def weights_fingerprint(self) -> str:
        """A fingerprint of all ranks' weights and of the files, as vLLM hides repacked weights."""
        from fledge.target.cache.job import files_fingerprint

        parts = self._engine.collective_rpc("fledge_fingerprint")
        parts = [*parts, files_fingerprint(self.directory)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Stop the engine, free its memory and destroy vLLM's process groups."""
        if self._engine is None:
            return
        self._engine = self.model = None
        engines.stop()

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method on all workers; returns the first worker's result."""
        return self._engine.collective_rpc(method, args=args)[0]

    def _model(self) -> Any:
        """The module, or a substitute with its config where workers are separate processes."""
        if self._engine.vllm_config.parallel_config.world_size == 1:
            return self._call("fledge_model")
        return SimpleNamespace(config=self._engine.model_config.hf_config, parameters=list)

    def _capture(self, rows: Sequence[list[int]]) -> Iterator[Captured]:
        """The states [N, A + 1, D] of every row that is not empty, in the order of arrival."""
        waiting: dict[str, int] = {}
        idle = 0
        try:
            for row, prompt, params in engines.requests(rows):
                waiting[self._engine.add_request(str(row), prompt, params)] = row
            while waiting:
                # a request's states arrive in a step after the one that finished it
                idle = 0 if self._engine.has_unfinished_requests() else idle + 1
                if idle > _MAX_IDLE_STEPS:
                    raise RuntimeError(f"vLLM returned no states for {len(waiting)} rows")
                self._engine.step()
                for request_id, states_NKD in self._call("fledge_take").items():
                    if request_id in waiting:  # else it is left from an interrupted call
                        row = waiting.pop(request_id)
                        assert len(states_NKD) == len(rows[row]), "vLLM lost states of a row"
                        yield Captured(row, states_NKD)
        finally:
            if waiting:
                self._engine.abort_request(list(waiting), internal=True)


class VLLMEagle3TargetModel(EngineEagle3TargetModel):
    """EAGLE-3 target backend on its own vLLM engine, or on a running server.

    Beside the arguments common to all engines, `from_pretrained` takes: `capture`, "connector"
    (states through vLLM's own connector), "worker" (from memory) or "auto" (the connector where
    the model allows); `url` and `shared_dir` of a running `vllm serve`; and arguments of
    vLLM's `EngineArgs`.
    """

    runner: VLLMTargetRunner | ConnectorRunner
    runner_type = VLLMTargetRunner
    _executor: ThreadPoolExecutor | None = None  # only with a server, which computes meanwhile

    @classmethod
    def _build(
        cls,
        model: str | PathLike[str],
        *,
        capture: Capture = "auto",
        url: str | None = None,
        **options: Any,
    ) -> VLLMTargetRunner | ConnectorRunner:
        if url is not None:
            return ServedRunner(model, url=url, **options)
        if capture != "worker":
            try:
                return EngineConnectorRunner(model, **options)
            except UnknownEnds as error:
                if capture == "connector":
                    raise
                log.warning("target.capture=worker is used: %s", error)
        for name in ("shared_dir", "device"):  # no files, and states stay on vLLM's device
            options.pop(name, None)
        return VLLMTargetRunner.build(model, **options)

    def _get_ready(self) -> None:
        self.overhead_tokens = 2**40  # padding is never run: as few calls as memory allows
        if isinstance(self.runner, ServedRunner):
            self.supports_async, self.prefetch = True, 2
            # one thread: batches are answered in order, the rows of each concurrently
            self._executor = ThreadPoolExecutor(1, "fledge-vllm")
        if self.supervision != "logits":
            self._head_of_states()  # reject a head that cannot be represented now, not later

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
