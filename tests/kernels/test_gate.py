"""Kernels compile for GPUs that are not here, and fit their shared memory."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import interpreted_triton  # noqa: F401  (skips where Triton is not installed)
from fledge.kernels import gate
from fledge.rollout import attention as blocked

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "compile_kernels.py"


def launched_kernels() -> set[str]:
    """Names of what the source launches: `kernel[grid](...)` or `module.kernel[grid](...)`."""
    launches = [
        node.func.value
        for files in ("kernels/*.py", "rollout/*.py")
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


@pytest.mark.parametrize("kernel", gate.TILES)
@pytest.mark.parametrize("channels", [16, 64, 96, 128, 256])
def test_tiles_depend_on_shared_memory(monkeypatch, kernel, channels):
    """Less shared memory never means a larger tile; blocks of keys stay multiples of GRANULE."""
    cpu = torch.device("cpu")
    large = gate.tile_for(kernel, channels, torch.bfloat16, cpu)
    monkeypatch.setattr(gate, "shared_memory", lambda device: gate.SMALLEST_SHARED_MEMORY)
    small = gate.tile_for(kernel, channels, torch.bfloat16, cpu)
    assert (small.pairs, small.keys, small.stages) <= (large.pairs, large.keys, large.stages)
    assert small.keys % gate.GRANULE == large.keys % gate.GRANULE == 0


# --- when kernels are used, and what is logged when they are not ----------------------------------


@pytest.fixture(autouse=True)
def fresh():
    gate._missing.cache_clear()
    gate._warn_once.cache_clear()
    yield
    gate._missing.cache_clear()
    gate._warn_once.cache_clear()


ON_GPU = SimpleNamespace(is_cuda=True)


def test_cpu_never_uses_a_kernel_and_logs_nothing(caplog):
    assert not gate.triton_runs(torch.zeros(1), what="norm", unsupported="anything")
    assert not caplog.records


def test_reasons_are_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(gate, "_missing", lambda: None)
    assert gate.triton_runs(ON_GPU, what="norm")
    for _ in range(2):
        assert not gate.triton_runs(ON_GPU, what="norm", unsupported="width 7")
    (record,) = caplog.records
    assert "norm" in record.getMessage()
    assert "width 7" in record.getMessage()


def test_switched_off_by_environment(monkeypatch, caplog):
    monkeypatch.setenv("FLEDGE_TRITON", "0")
    assert not gate.triton_runs(ON_GPU, what="norm")
    assert "FLEDGE_TRITON=0" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "other", "channels", "kib", "supported"),
    [
        (torch.bfloat16, torch.bfloat16, 96, 99, True),
        (torch.bfloat16, torch.bfloat16, 96, 64, False),
        (torch.float64, torch.float64, 64, 99, False),
        (torch.bfloat16, torch.float32, 64, 99, False),
        (torch.float16, torch.float16, 8, 99, False),
        (torch.float16, torch.float16, 264, 99, False),
        (torch.float16, torch.float16, 20, 99, False),
    ],
)
def test_what_attention_supports(monkeypatch, dtype, other, channels, kib, supported):
    monkeypatch.setattr(blocked, "triton_runs", lambda x, *, what, unsupported: not unsupported)
    monkeypatch.setattr(blocked, "shared_memory", lambda device: kib << 10)
    q, k = torch.zeros(1, 2, channels, dtype=dtype), torch.zeros(1, 1, channels, dtype=other)
    assert blocked.kernel_runs(q, k, k) is supported
