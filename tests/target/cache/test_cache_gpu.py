"""A cache read on a GPU: the stored bytes decode to the same numbers as on a CPU."""

import pytest
import torch

from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.cache.format import from_fp8
from fledge.target.hf.model import HFEagle3TargetModel
from target.cache.caches import token_row, write_cache
from target.contract import packed_rows, some_documents
from target.tiny_models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("encoding", ["hidden", "hidden-fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reads_what_a_cpu_reads(tmp_path, encoding, dtype):
    rows = [token_row(tokens) for row in some_documents() for tokens in row]
    with HFEagle3TargetModel(tiny_model("llama", dtype=dtype), supervision="hidden") as live:
        write_cache(tmp_path / "c", live, rows, encoding, dtype=dtype)
    tensors = packed_rows(some_documents(), 14)
    with (
        CachedEagle3TargetModel(tmp_path / "c", device="cuda") as on_gpu,
        CachedEagle3TargetModel(tmp_path / "c") as on_cpu,
    ):
        gpu_tensors = dict(on_gpu.generate_batch(*tensors).tensors())
        for name, tensor in on_cpu.generate_batch(*tensors).tensors():
            assert gpu_tensors[name].is_cuda, name
            assert torch.equal(gpu_tensors[name].cpu(), tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bit_numbers_are_decoded_alike_on_cpu_and_gpu(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(70_000, 1)  # more than one block of a GPU
    states = codes.view(torch.float8_e4m3fn)
    scale = torch.logspace(-30, 30, 70_000 * 2, dtype=torch.float64).float().view(-1, 2)
    decoded = from_fp8(states.cuda(), scale.cuda(), dtype)
    assert torch.equal(decoded.cpu(), from_fp8(states, scale, dtype))
