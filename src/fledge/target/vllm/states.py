"""Files of hidden states that vLLM's connector writes, one for each request: waited for, checked
against the question, read and removed.

    hidden_states   [N, K, D]   K captured layers in ascending order
    token_ids       [N]

Beside a file that is being written lies `NAME.lock`, on which the writer holds a lock; connectors
that put whole files in place need none.
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
    """States [N, K, D] of these tokens, whose file is then gone; None: not written yet."""
    locked = _lock_state(path)
    if locked or not path.exists():
        return None
    try:
        held = load_tensors(path, what="a file of hidden states")
    except BadInput:
        if locked is None:  # without a lock it may be half written
            return None
        raise
    states_NKD = _checked(held, tokens, where=str(path))
    discard(path)
    return states_NKD


def discard(path: Path) -> None:
    """Remove the file and its lock."""
    for one in (path, _lock_of(path)):
        one.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock_state(path: Path) -> bool | None:
    """Whether a writer holds the file's lock; None: there is no lock."""
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


def _checked(held: dict[str, Tensor], tokens: Sequence[int], *, where: str) -> Tensor:
    """A file that answers another question, or a part of this one, must never pass."""
    if not {"hidden_states", "token_ids"} <= held.keys():
        raise BadInput(f"no hidden states in this file, but {sorted(held)}", where=where)
    states_NKD, token_ids_N = held["hidden_states"], held["token_ids"]
    if token_ids_N.tolist() != list(tokens):
        raise BadInput("these are hidden states of other tokens than were asked about", where=where)
    if states_NKD.ndim != 3 or states_NKD.dtype not in _FLOATS:
        found = f"{states_NKD.dtype} {list(states_NKD.shape)}"
        raise BadInput(
            f"hidden states should be floats [tokens, layers, width]: {found}", where=where
        )
    if len(states_NKD) != len(tokens):
        raise BadInput(
            f"vLLM handed over the states of {len(states_NKD)} of {len(tokens)} tokens",
            where=where,
            fix="start it with --no-enable-prefix-caching",
        )
    return states_NKD
