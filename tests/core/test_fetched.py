"""Fetched values are those of their step, whatever was launched on the device since."""

import pytest
import torch

from fledge.core.transfer import Fetched


def test_a_host_tensor_is_read_unchanged():
    assert Fetched(torch.tensor([1, 0])).read().tolist() == [1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reading_does_not_wait_for_later_work():
    flags = Fetched(torch.arange(2, device="cuda"))
    torch.cuda._sleep(10**9)  # about half a second
    later = torch.cuda.Event()
    later.record()
    assert flags.read().tolist() == [0, 1]
    assert not later.query()
    torch.cuda.synchronize()
