"""The vLLM backend without vLLM: its errors, and that importing it imports no engine."""

import importlib.util
import subprocess
import sys

import pytest
import torch

import fledge
from fledge.target.vllm.engine import check_version, real_tokens, vllm_dtype


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_shows_how_to_install_it() -> None:
    build, load = fledge.VLLMTargetRunner.build, fledge.VLLMEagle3TargetModel.from_pretrained
    for make in (build, load):
        with pytest.raises(fledge.BadInput, match=r"not installed.*pip install .*vllm==0\.32"):
            make("some/model", dtype="float32")
        with pytest.raises(ImportError):  # the usual guard for optional packages
            make("some/model", dtype="float32")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_known_versions_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "0.3.2", "1.32.0", "dev"])
def test_unknown_versions_are_refused_and_known_ones_listed(version: str) -> None:
    with pytest.raises(
        fledge.BadInput, match=rf"vLLM {version} is not supported.*0\.32.*pip install"
    ):
        check_version(version)


def test_dtypes_as_vllm_spells_them() -> None:
    dtypes = [None, "auto", "bfloat16", torch.float32, torch.float16]
    assert [vllm_dtype(dtype) for dtype in dtypes] == [
        "auto",
        "auto",
        "bfloat16",
        "float32",
        "float16",
    ]


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
