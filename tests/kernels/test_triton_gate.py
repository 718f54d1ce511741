"""When GPU kernels are used, and what is logged when they are not."""

from types import SimpleNamespace

import pytest
import torch

from fledge.kernels import gate as triton_gate
from fledge.rollout import attention as blocked


@pytest.fixture(autouse=True)
def fresh():
    triton_gate._missing.cache_clear()
    triton_gate._warn_once.cache_clear()
    yield
    triton_gate._missing.cache_clear()
    triton_gate._warn_once.cache_clear()


ON_GPU = SimpleNamespace(is_cuda=True)


def test_cpu_never_uses_a_kernel_and_logs_nothing(caplog):
    assert not triton_gate.triton_runs(torch.zeros(1), what="norm", unsupported="anything")
    assert not caplog.records


def test_reasons_are_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(triton_gate, "_missing", lambda: None)
    assert triton_gate.triton_runs(ON_GPU, what="norm")
    for _ in range(2):
        assert not triton_gate.triton_runs(ON_GPU, what="norm", unsupported="width 7")
    (record,) = caplog.records
    assert "norm" in record.getMessage()
    assert "width 7" in record.getMessage()


def test_switched_off_by_environment(monkeypatch, caplog):
    monkeypatch.setenv("FLEDGE_TRITON", "0")
    assert not triton_gate.triton_runs(ON_GPU, what="norm")
    assert "FLEDGE_TRITON=0" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "other", "channels", "reason"),
    [
        (torch.bfloat16, torch.bfloat16, 96, None),
        (torch.float64, torch.float64, 64, "float64"),
        (torch.bfloat16, torch.float32, 64, "keys or values"),
        (torch.float16, torch.float16, 8, "head dim 8"),
        (torch.float16, torch.float16, 264, "head dim 264"),
        (torch.float16, torch.float16, 20, "head dim 20"),
    ],
)
def test_what_attention_supports(monkeypatch, dtype, other, channels, reason):
    reasons = []
    monkeypatch.setattr(
        blocked, "triton_runs", lambda x, *, what, unsupported: reasons.append(unsupported) or True
    )
    q, k = torch.zeros(1, 2, channels, dtype=dtype), torch.zeros(1, 1, channels, dtype=other)
    blocked.kernel_runs(q, k, k)
    assert (reasons == [None]) if reason is None else reason in reasons[0]
