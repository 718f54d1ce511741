"""Targets with offloaded or sharded weights (see also `test_sharded_target`)."""

import accelerate
import pytest
import torch
import torch.distributed as dist
from contract import AUX_LAYER_IDS, padded_rows
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fledge import BadInput, HFEagle3TargetModel
from fledge.core.batch import SUPERVISIONS


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def partial_model(how, mesh, tmp_path):
    model = tiny_model("llama")
    if how == "tensor parallel":
        return parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    if how == "in host memory":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if how == "on disk":
        return accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("supervision", SUPERVISIONS)
@pytest.mark.parametrize("how", ["tensor parallel", "FSDP2", "in host memory", "on disk"])
def test_offloaded_and_sharded_targets_answer_like_the_whole_one(how, supervision, mesh, tmp_path):
    whole = HFEagle3TargetModel(tiny_model("llama"), AUX_LAYER_IDS, supervision=supervision)
    model = partial_model(how, mesh, tmp_path)
    target = HFEagle3TargetModel(model, AUX_LAYER_IDS, supervision=supervision)
    assert not target.joins  # a single rank has nobody to wait for
    for backend in (whole, target):
        backend.set_vocab_mapping(torch.arange(0, 97, 3))
    expected = dict(whole.generate_batch(*padded_rows()).tensors())
    actual = dict(target.generate_batch(*padded_rows()).tensors())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    whole_info, info = whole.info(), target.info()
    assert info.weights_fingerprint == whole_info.weights_fingerprint
    assert info.weight_dtypes == whole_info.weight_dtypes
    assert torch.equal(info.head.weight_VD, whole_info.head.weight_VD)
    assert torch.equal(info.final_norm.weight_D, whole_info.final_norm.weight_D)
    embeddings = [backend.get_input_embeddings().weight for backend in (whole, target)]
    assert torch.equal(*embeddings)


def test_weights_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config)
    with pytest.raises(BadInput, match=r"embed_tokens.weight is on the meta device.*load") as error:
        HFEagle3TargetModel(model, AUX_LAYER_IDS)
    assert "\n" not in str(error.value)
