"""Files of hidden states that vLLM's connector writes, one per request: they are checked against
the request's tokens, read and removed.

    hidden_states   [N, K, D]   K captured layers in ascending order
    token_ids       [N]

While a file is being written, its writer holds a lock on `NAME.lock` beside it; connectors that
move whole files into place need none.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.reading import load_tensors

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def take_states(path: Path, tokens: Sequence[int]) -> Tensor | None:
    """Read and remove the file with the states [N, K, D] of these tokens; None if it is not written
    yet."""
    locked = _lock_state(path)
    if locked or not path.exists():
        return None
    try:
        tensors = load_tensors(path, what="a file of hidden states")
    except BadInput:
        if locked is None:  # without a lock it may be half written
            return None
        raise
    states_NKD = _check_states(tensors, tokens, where=str(path))
    discard(path)
    return states_NKD


def discard(path: Path) -> None:
    """Remove the file and its lock."""
    for file in (path, _lock_of(path)):
        file.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock_state(path: Path) -> bool | None:
    """Whether a writer holds the file's lock; None if there is no lock file."""
    try:
        descriptor = os.open(_lock_of(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _check_states(tensors: dict[str, Tensor], tokens: Sequence[int], *, where: str) -> Tensor:
    """The states in a file; raises unless they are those of exactly these tokens."""
    if not {"hidden_states", "token_ids"} <= tensors.keys():
        raise BadInput(f"no hidden states in this file, but {sorted(tensors)}", where=where)
    states_NKD, token_ids_N = tensors["hidden_states"], tensors["token_ids"]
    if token_ids_N.tolist() != list(tokens):
        raise BadInput("these are hidden states of other tokens than were asked about", where=where)
    if states_NKD.ndim != 3 or states_NKD.dtype not in _FLOATS:
        actual = f"{states_NKD.dtype} {list(states_NKD.shape)}"
        raise BadInput(
            f"hidden states should be floats [tokens, layers, width]: {actual}", where=where
        )
    if len(states_NKD) != len(tokens):
        raise BadInput(
            f"vLLM returned the states of {len(states_NKD)} of {len(tokens)} tokens",
            where=where,
            fix="start it with --no-enable-prefix-caching",
        )
    return states_NKD
