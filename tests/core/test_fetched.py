"""What is read of a step is that step's, whatever the device was asked since."""

import pytest
import torch

from fledge.core.transfer import Fetched


def test_a_tensor_on_the_host_is_read_as_it_is():
    assert Fetched(torch.tensor([1, 0])).read().tolist() == [1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reading_waits_for_nothing_that_was_asked_later():
    flags = Fetched(torch.arange(2, device="cuda"))
    torch.cuda._sleep(10**9)  # about half a second
    later = torch.cuda.Event()
    later.record()
    assert flags.read().tolist() == [0, 1]
    assert not later.query()
    torch.cuda.synchronize()
