"""The parts of the vLLM backend that need no vLLM: versions, rows, files of hidden states."""

import fcntl
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fledge
from fledge.core.errors import BadInput
from fledge.target.vllm.engine import (
    StatesPlace,
    real_tokens,
    take_states,
    vllm_dtype,
)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_shows_how_to_install_it() -> None:
    build, load = fledge.VLLMTargetRunner.build, fledge.VLLMEagle3TargetModel.from_pretrained
    for make in (build, load):
        with pytest.raises(BadInput, match=r"not installed.*pip install .*vllm==0\.32"):
            make("some/model", dtype="float32")
        with pytest.raises(ImportError):  # the usual guard for optional packages
            make("some/model", dtype="float32")


def test_dtypes_as_vllm_spells_them() -> None:
    dtypes = [None, "auto", "bfloat16", torch.float32, torch.float16]
    names = ["auto", "auto", "bfloat16", "float32", "float16"]
    assert [vllm_dtype(dtype) for dtype in dtypes] == names


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_is_removed_whatever_the_dtype_of_the_mask(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    rows = real_tokens(torch.arange(9).view(3, 3), mask.to(dtype))
    assert rows == [[0, 1], [3, 4, 5], []]
    with pytest.raises(ValueError, match="attention_mask"):
        real_tokens(torch.arange(3)[None], torch.tensor([[0, 1, 1]]).to(dtype))


def test_importing_the_backend_imports_no_engine() -> None:
    code = (
        "import sys, fledge.target.vllm.runner; "
        "bad = {'sglang', 'vllm', 'pydantic', 'datasets', 'gguf', 'fastapi'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TOKENS = [5, 6, 7, 8]


def write(path: Path, *, tokens: Any = TOKENS, states: torch.Tensor | None = None) -> torch.Tensor:
    states = torch.randn(len(TOKENS), 3, 2) if states is None else states
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, path)
    return states


def test_a_file_is_taken_once_its_writer_has_released_the_lock(tmp_path: Path) -> None:
    path, lock = tmp_path / "one.safetensors", tmp_path / "one.safetensors.lock"
    assert take_states(path, TOKENS) is None
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert take_states(path, TOKENS) is None
        written = write(path)
        assert take_states(path, TOKENS) is None
        assert path.exists()
    taken = take_states(path, TOKENS)
    assert taken is not None
    assert torch.equal(taken, written)
    assert list(tmp_path.iterdir()) == []


def test_a_partial_file_is_pending_until_its_writer_has_released_the_lock(tmp_path: Path) -> None:
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
    ],
    ids=str,
)
def test_states_that_do_not_match_the_request_are_refused(
    given: Any, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "one.safetensors", **given)
    with pytest.raises(BadInput, match=message):
        take_states(tmp_path / "one.safetensors", TOKENS)


def test_directories_are_removed_even_if_their_owner_was_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib; from fledge.target.vllm.engine import StatesPlace; "
        f"place = StatesPlace(pathlib.Path({str(tmp_path)!r})); (place.make() / 'one').touch(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    [leftover] = tmp_path.iterdir()
    first, second = StatesPlace(tmp_path), StatesPlace(tmp_path)
    made = {first.make(), second.make()}
    assert set(tmp_path.iterdir()) == made
    assert leftover not in made
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []
