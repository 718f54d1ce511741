"""Several ranks (gloo) on this machine, for tests that need more than one process.

    def case(factor):
        world = join_world(torch.device("cpu"))
        return world.rank * factor

    assert run_ranks(2, case, 10) == [0, 10]

Ranks are forked: they start quickly and inherit what the test has already built.
"""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list:
    """Call `function(*args)` on `size` ranks; return results by rank, or raise the first error.

    The ranks have torchrun's environment; the function itself joins the group (`join_world`,
    `init_device_mesh`). Results and errors come back pickled.
    """
    context = multiprocessing.get_context("fork")
    port = _free_port()
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, port, sender, function, args))
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    try:
        return _collect(receivers, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(
    rank: int, size: int, port: int, end: Connection, function: Callable[..., Any], args: Any
) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        message = pickle.dumps((True, function(*args)))
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test shows it
        error.add_note(f"on rank {rank} of {size}:\n{traceback.format_exc()}")
        message = _pickled(error)
    with suppress(BrokenPipeError):  # another rank failed first, and the receiver is closed
        end.send_bytes(message)
    if dist.is_initialized():
        with suppress(RuntimeError):  # the others may be gone
            dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes:
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)  # some errors can be pickled but not unpickled
    except Exception:  # noqa: BLE001
        message = pickle.dumps((False, RuntimeError("\n".join(error.__notes__))))
    return message


def _collect(ends: list[Connection], deadline: float) -> list:
    results: dict[Connection, Any] = {}
    while len(results) < len(ends):
        open_ends = [end for end in ends if end not in results]
        ready = wait(open_ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(open_ends)} of {len(ends)} ranks did not finish")
        for end in ready:
            try:
                fine, result = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {ends.index(end)} died without a word") from None
            if not fine:
                raise result
            results[end] = result
    return [results[end] for end in ends]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
