"""Kernels compile for GPUs that are not here, and fit their shared memory."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import interpreted_triton  # noqa: F401  (skips where Triton is not installed)
from fledge.kernels import gate as tiles
from fledge.rollout import attention as blocked

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "compile_kernels.py"


def launched_kernels() -> set[str]:
    """Names of what the source launches: `kernel[grid](...)` or `module.kernel[grid](...)`."""
    launches = [
        node.func.value
        for files in ("kernels/*.py", "rollout/*.py", "methods/block/triton_*.py")
        for path in (ROOT / "src/fledge").glob(files)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    return {name.attr if isinstance(name, ast.Attribute) else name.id for name in launches}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100", "l40s", "h100", "b200", "rtx5090"])
def test_kernels_compile_and_fit(gpu, tmp_path):
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "COLUMNS": "100"}
    command = [sys.executable, SCRIPT, "--gpu", gpu, "--heads", "128", "--heads", "256"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("│")}
    assert compiled == launched_kernels()


@pytest.mark.slow
def test_kernels_in_float32_fit_the_smallest(tmp_path):
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, SCRIPT, "--gpu", "l40s", "--dtype", "float32", "--heads", "256"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("kernel", tiles.TILES)
@pytest.mark.parametrize("channels", [16, 64, 96, 128, 256])
def test_tiles_depend_on_shared_memory(monkeypatch, kernel, channels):
    """Less shared memory never means a larger tile; blocks of keys stay multiples of GRANULE."""
    cpu = torch.device("cpu")
    large = tiles.tile_for(kernel, channels, torch.bfloat16, cpu)
    monkeypatch.setattr(tiles, "shared_memory", lambda device: tiles.SMALLEST_SHARED_MEMORY)
    small = tiles.tile_for(kernel, channels, torch.bfloat16, cpu)
    assert (small.pairs, small.keys, small.stages) <= (large.pairs, large.keys, large.stages)
    assert small.keys % tiles.GRANULE == large.keys % tiles.GRANULE == 0


def test_gpus_with_too_little_shared_memory_use_torch(monkeypatch):
    reasons = []
    monkeypatch.setattr(
        blocked, "triton_runs", lambda x, *, what, unsupported: reasons.append(unsupported)
    )
    monkeypatch.setattr(blocked, "shared_memory", lambda device: 64 << 10)
    q, k = torch.zeros(1, 2, 64), torch.zeros(1, 1, 64)
    blocked.kernel_runs(q, k, k)
    assert reasons == ["this GPU has less than 99 KiB of shared memory"]
