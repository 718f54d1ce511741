"""Files of hidden states: never half of one, never another question's."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fledge.core.errors import BadInput
from fledge.target.vllm.place import StatesPlace
from fledge.target.vllm.states import take_states

TOKENS = [5, 6, 7, 8]


def write(path: Path, *, tokens: Any = TOKENS, states: torch.Tensor | None = None) -> torch.Tensor:
    states = torch.randn(len(TOKENS), 3, 2) if states is None else states
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, path)
    return states


def test_a_file_is_taken_when_its_writer_has_let_go(tmp_path: Path) -> None:
    path, lock = tmp_path / "one.safetensors", tmp_path / "one.safetensors.lock"
    assert take_states(path, TOKENS) is None
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert take_states(path, TOKENS) is None
        written = write(path)
        assert take_states(path, TOKENS) is None
        assert path.exists()
    taken = take_states(path, TOKENS)
    assert taken is not None
    assert torch.equal(taken, written)
    assert list(tmp_path.iterdir()) == []


def test_half_a_file_is_not_there_yet_unless_its_writer_has_let_go(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    written = write(path)
    whole = path.read_bytes()
    for length in (0, 4, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert take_states(path, TOKENS) is None
    path.write_bytes(whole)
    taken = take_states(path, TOKENS)
    assert taken is not None
    assert torch.equal(taken, written)
    path.write_bytes(whole[:-1])
    (tmp_path / "one.safetensors.lock").touch()
    with pytest.raises(BadInput, match="broken"):
        take_states(path, TOKENS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": [5, 6, 7, 9]}, "other tokens"),
        ({"tokens": [5, 6, 7]}, "other tokens"),
        ({"states": torch.zeros(3, 3, 2)}, r"3 of 4 tokens.*prefix-caching"),
        ({"states": torch.zeros(4, 6)}, "layers, width"),
        ({"states": torch.zeros(4, 3, 2, dtype=torch.int32)}, "floats"),
    ],
    ids=str,
)
def test_another_answer_is_refused(given: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", **given)
    with pytest.raises(BadInput, match=message):
        take_states(tmp_path / "one.safetensors", TOKENS)


def test_a_place_goes_with_its_holder_even_if_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib; from fledge.target.vllm.place import StatesPlace; "
        f"(StatesPlace(pathlib.Path({str(tmp_path)!r})).make() / 'one').touch(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    ours, theirs = StatesPlace(tmp_path), StatesPlace(tmp_path)
    made = {ours.make(), theirs.make()}
    assert set(tmp_path.iterdir()) == made
    assert left not in made
    ours.remove()
    theirs.remove()
    assert list(tmp_path.iterdir()) == []
