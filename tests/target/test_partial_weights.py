"""Targets of which this process holds a part only: what works, and one line for what does not."""

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


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(how, mesh):
    model = tiny_model("llama")
    if how == "tensor parallel":
        return parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    assert "target.backend=sglang or vllm" in text
    return text


@pytest.mark.parametrize("how", ["tensor parallel", "FSDP2"])
def test_a_sharded_target_answers_with_logits_and_refuses_the_rest(how, mesh):
    expected = HFEagle3TargetModel(tiny_model("llama"), AUX_LAYER_IDS).generate_batch(
        *padded_rows()
    )
    target = HFEagle3TargetModel(sharded(how, mesh), AUX_LAYER_IDS)
    batch = target.generate_batch(*padded_rows())
    assert torch.equal(batch.logits, expected.logits)
    assert torch.equal(batch.aux_hidden_states, expected.aux_hidden_states)
    with pytest.raises(BadInput, match="sharded over ranks") as error:
        target.info()
    one_line(error)
    for supervision in ("hidden", "probs"):
        with pytest.raises(BadInput, match="its output head is sharded over ranks") as error:
            HFEagle3TargetModel(sharded(how, mesh), AUX_LAYER_IDS, supervision=supervision)
        assert "use supervision 'logits'" in one_line(error)


@pytest.mark.parametrize("supervision", ["logits", "probs", "hidden"])
def test_an_offloaded_target_is_refused(supervision):
    model = accelerate.cpu_offload(tiny_model("llama"), execution_device="cpu")
    with pytest.raises(BadInput, match="offloaded models are not supported yet") as error:
        HFEagle3TargetModel(model, AUX_LAYER_IDS, supervision=supervision)
    one_line(error)
