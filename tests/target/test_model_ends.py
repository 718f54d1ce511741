"""Embedding, norm and head read from a model's files act as they do in the whole model."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BUILDERS, tiny_model

import fledge.target.hf.embedding_and_head as ends_module
from fledge.core.errors import BadInput
from fledge.target.hf.embedding_and_head import find_head_module, read_ends
from fledge.target.layers import find_layers, layer_outputs, muted_head

REFUSED = {"minicpm3"}  # divides the output of its norm
IDS = torch.tensor([[5, 17, 3, 88, 41]])


@torch.no_grad()
def last_layer_and_head(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output of the last layer, the input of the head, and the logits."""
    seen: dict[str, torch.Tensor] = {}

    def answer(hidden: torch.Tensor) -> torch.Tensor:
        seen["given"] = hidden
        return hidden.new_zeros((*hidden.shape[:-1], 1))

    layers = find_layers(model)
    last = len(layers) - 1
    with layer_outputs(layers, [last], lambda _, out: seen.update(last=out.clone())):
        logits = model(IDS, use_cache=False).logits
        with muted_head(find_head_module(model), answer):
            model(IDS, use_cache=False)
    return seen["last"][0], seen["given"][0], logits[0]


@pytest.mark.parametrize("name", BUILDERS)
def test_states_of_the_last_layer_become_the_models_logits(name: str, tmp_path: Any) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    last_ND, given_ND, logits_NV = last_layer_and_head(model)
    if name in REFUSED:
        with pytest.raises(BadInput, match=r"more than a norm.*target\.backend=hf"):
            read_ends(tmp_path)
        return
    ends = read_ends(tmp_path)
    torch.testing.assert_close(ends.head_input(last_ND), given_ND, rtol=1e-6, atol=1e-6)
    actual_NV = ends.head.logits(ends.head_input(last_ND))
    torch.testing.assert_close(actual_NV, logits_NV, rtol=1e-5, atol=1e-5)
    assert torch.equal(ends.embedding_VD, model.get_input_embeddings().weight)
    assert ends.config.get_text_config().num_hidden_layers == 8
    half = ends.to(torch.device("cpu"), torch.bfloat16)
    assert half.head_input(last_ND.bfloat16()).dtype == torch.bfloat16
    assert half.head.weight_VD.dtype == half.embedding_VD.dtype == torch.bfloat16


def test_no_decoder_layer_is_read(tmp_path: Any, monkeypatch: Any) -> None:
    """Only a few tensors are loaded, whatever the size of the target."""
    tiny_model("llama").save_pretrained(tmp_path)
    skipped = []
    check_complete = ends_module.check_complete

    def counted(report: Any, where: str) -> None:
        skipped.append(len(report["unexpected_keys"]))
        check_complete(report, where)

    monkeypatch.setattr(ends_module, "check_complete", counted)
    read_ends(tmp_path)
    assert skipped == [8 * 9]


def test_a_quantized_body_does_not_matter_and_a_missing_head_does(tmp_path: Any) -> None:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.save_pretrained(tmp_path)
    ends = read_ends(tmp_path)
    assert torch.equal(ends.head.weight_VD, model.lm_head.weight)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight_packed"] = weights.pop("lm_head.weight").to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"lack lm_head\.weight.*target\.backend=hf"):
        read_ends(tmp_path)
