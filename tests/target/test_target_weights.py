"""Weights: fingerprints, dtypes, quantized and sharded (see `test_sharded_target`)."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from contract import AUX_LAYER_IDS, assert_same, padded_rows
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fledge
from fledge.core.batch import SUPERVISIONS
from fledge.target.hf.loading import tokenizer_in
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.weights import (
    describe_weights,
    tokenizer_fingerprint,
    weights_fingerprint,
)


def test_every_weight_affects_the_fingerprint() -> None:
    model = tiny_model("llama")
    before = weights_fingerprint(model)
    assert weights_fingerprint(tiny_model("llama")) == before
    assert weights_fingerprint(tiny_model("llama", seed=1)) != before
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        first, last = flat[0].item(), flat[-1].item()
        flat[-1] = last + 1
        assert weights_fingerprint(model) != before
        flat[0], flat[-1] = last, first  # a permutation keeps plain sums
        assert weights_fingerprint(model) != before
        flat[0], flat[-1] = first, last
    assert weights_fingerprint(model) == before
    assert weights_fingerprint(model.bfloat16()) != before


def test_swapped_rows_or_columns_change_the_fingerprint() -> None:
    layer = torch.nn.Linear(4096, 5, bias=False)
    before = weights_fingerprint(layer)
    with torch.no_grad():
        layer.weight[[0, 1]] = layer.weight[[1, 0]]
        swapped_rows = weights_fingerprint(layer)
        layer.weight[[0, 1]] = layer.weight[[1, 0]]
        layer.weight[:, [7, 9]] = layer.weight[:, [9, 7]]
    assert len({before, swapped_rows, weights_fingerprint(layer)}) == 3


def test_dtype_report() -> None:
    model = tiny_model("llama")
    assert describe_weights(model) == "float32 100.0%"
    model.model.embed_tokens.bfloat16()
    model.lm_head.bfloat16()
    assert describe_weights(model) == "float32 95.2%, bfloat16 4.8%"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_targets_answer_in_their_own_dtype(dtype: torch.dtype) -> None:
    for name in ARCHITECTURES:
        model = tiny_model(name, dtype=dtype)
        target = HFEagle3TargetModel(model, supervision="hidden")
        batch = target.generate_batch(*padded_rows())
        assert batch.aux_hidden_states.dtype == batch.last_hidden_states.dtype == dtype
        assert target.info().dtype == dtype
        logits = HFEagle3TargetModel(model).generate_batch(*padded_rows()).logits
        again = batch.with_logits(target.info().head).logits
        torch.testing.assert_close(again, logits, rtol=2e-2, atol=2e-2)


def saved(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["llama", "gemma3-conditional", "gpt2"])
def test_from_pretrained_reads_what_was_saved(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    target = HFEagle3TargetModel.from_pretrained(saved(model, tmp_path), device="cpu")
    assert target.supervision == "hidden"
    assert target.info().tokenizer_fingerprint is None
    expected = HFEagle3TargetModel(model, supervision="hidden").generate_batch(*padded_rows())
    assert_same(target.generate_batch(*padded_rows()), expected)


def test_a_model_that_cannot_be_loaded_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(fledge.BadInput):
        HFEagle3TargetModel.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(fledge.BadInput, match="could not be loaded") as caught:
        HFEagle3TargetModel.from_pretrained(tmp_path, device="cpu")
    assert "\n" not in str(caught.value)


def save_as_fp8(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Save a checkpoint in block-wise fp8; return the weights that it represents."""
    stored: dict[str, torch.Tensor] = {}
    represented: dict[str, torch.Tensor] = {}
    for name, weight in load_file(saved(model, directory) / "model.safetensors").items():
        stored[name] = represented[name] = weight
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name] = codes.flatten(2, 3).flatten(0, 1)
            stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            represented[name] = (codes.float() * scale).flatten(2, 3).flatten(0, 1)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(config))
    return represented


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU fp8 weights stay fp8")
@pytest.mark.skipif(transformers.__version__ < "5", reason="transformers 4 wants a GPU for fp8")
def test_an_fp8_checkpoint_answers_with_its_stored_weights(tmp_path: Path) -> None:
    """Without a GPU transformers dequantizes the stored weights."""
    model = tiny_model("llama")
    represented = save_as_fp8(model, tmp_path)
    target = HFEagle3TargetModel.from_pretrained(tmp_path, device="cpu")
    assert target.info().weight_dtypes == "float32 100.0%"
    full = HFEagle3TargetModel(model, supervision="hidden").generate_batch(*padded_rows())
    model.load_state_dict(represented)
    same = HFEagle3TargetModel(model, supervision="hidden").generate_batch(*padded_rows())
    batch = target.generate_batch(*padded_rows())
    torch.testing.assert_close(batch.last_hidden_states, same.last_hidden_states)
    assert not torch.allclose(batch.last_hidden_states, full.last_hidden_states, atol=1e-2)


def test_a_missing_quantization_library_is_a_one_line_error(tmp_path: Path) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(fledge.BadInput, match="bitsandbytes") as caught:
        HFEagle3TargetModel.from_pretrained(
            saved(tiny_model("llama"), tmp_path),
            device="cpu",
            quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True),
        )
    assert "\n" not in str(caught.value)


def test_a_quantized_tensor_subclass_is_reported_by_what_it_stores() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(Packed(torch.arange(64, dtype=torch.int8).view(8, 8)), False)
    assert describe_weights(layer) == "int8 66.7%, float32 33.3%"
    before = weights_fingerprint(layer)
    layer.weight.codes[0, 0] += 1
    assert weights_fingerprint(layer) != before


class Packed(torch.Tensor):
    """int8 codes with a scale per row whose dtype is float32, as in torchao."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "Packed":
        tensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        tensor.codes, tensor.scales = codes, torch.ones(len(codes))
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(str(func))


def test_tokenizer_fingerprint_covers_vocabulary_and_template() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def tokenizer(words: str, template: str) -> Any:
        vocabulary = {word: i for i, word in enumerate(words.split())}
        result = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
        )
        result.chat_template = template
        return result

    fingerprints = [
        tokenizer_fingerprint(tokenizer(words, template))
        for words, template in [("a b", "x"), ("b a", "x"), ("a b c", "x"), ("a b", "y")]
    ]
    assert len(set(fingerprints)) == 4
    assert tokenizer_fingerprint(tokenizer("a b", "x")) == fingerprints[0]
    target = HFEagle3TargetModel(tiny_model("llama"), tokenizer=tokenizer("a b", "x"))
    assert target.info().tokenizer_fingerprint == fingerprints[0]


def test_a_tokenizer_that_cannot_be_read_is_reported(tmp_path, caplog) -> None:
    assert tokenizer_in(tmp_path, trust_remote_code=False) is None
    assert caplog.messages == []
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{not JSON")
    (tmp_path / "tokenizer_config.json").write_text("{not JSON")
    assert tokenizer_in(tmp_path, trust_remote_code=False) is None
    [message] = caplog.messages
    assert f"{tmp_path}: its tokenizer cannot be read" in message


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def partial_model(how, mesh):
    model = tiny_model("llama")
    if how == "tensor parallel":
        return parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("supervision", SUPERVISIONS)
@pytest.mark.parametrize("how", ["tensor parallel", "FSDP2"])
def test_sharded_targets_answer_like_the_whole_one(how, supervision, mesh):
    whole = HFEagle3TargetModel(tiny_model("llama"), AUX_LAYER_IDS, supervision=supervision)
    model = partial_model(how, mesh)
    target = HFEagle3TargetModel(model, AUX_LAYER_IDS, supervision=supervision)
    assert not target.joins  # a single rank has nobody to wait for
    for backend in (whole, target):
        backend.set_vocab_mapping(torch.arange(0, 97, 3))
    assert_same(target.generate_batch(*padded_rows()), whole.generate_batch(*padded_rows()))
    whole_info, info = whole.info(), target.info()
    assert info.weights_fingerprint == whole_info.weights_fingerprint
    assert info.weight_dtypes == whole_info.weight_dtypes
    assert torch.equal(info.head.weight_VD, whole_info.head.weight_VD)
    assert torch.equal(info.final_norm.weight_D, whole_info.final_norm.weight_D)
    embeddings = [backend.get_input_embeddings().weight for backend in (whole, target)]
    assert torch.equal(*embeddings)
