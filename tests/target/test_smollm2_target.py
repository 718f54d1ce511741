"""A real model through the whole path: SmolLM2-135M, if it is cached or can be fetched."""

import pytest
import torch

import fledge
from fledge.target.hf.model import HFEagle3TargetModel


@pytest.fixture(scope="module")
def target() -> HFEagle3TargetModel:
    try:
        fledge.local_model("smollm2-135m")
    except fledge.BadInput as missing:
        pytest.skip(str(missing))
    return HFEagle3TargetModel.from_pretrained("smollm2-135m", device="cpu")


def test_smollm2_predicts_paris_from_hidden_states(target: HFEagle3TargetModel) -> None:
    info = target.info()
    assert (info.depth, info.hidden_size, info.vocab_size) == (30, 576, 49152)
    assert target.aux_layer_ids == [1, 14, 26]
    assert info.tokenizer_fingerprint is not None
    ids = target.tokenizer("The capital of France is", return_tensors="pt").input_ids
    batch = target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    top = batch.with_logits(info.head).logits[0, -2].argmax()
    assert target.tokenizer.decode(top) == " Paris"


def test_smollm2_agrees_with_transformers(target: HFEagle3TargetModel) -> None:
    ids = target.tokenizer("Two and two make four.", return_tensors="pt").input_ids
    ones = torch.ones_like(ids)
    batch = target.generate_batch(ids, ones, ones)
    with torch.no_grad():
        expected = target.model(ids, output_hidden_states=True)
    aux = torch.cat([expected.hidden_states[i + 1] for i in (1, 14, 26)], dim=-1)
    assert torch.equal(batch.aux_hidden_states, aux)
    logits = batch.with_logits(target.info().head).logits
    torch.testing.assert_close(logits[:, :-1], expected.logits[:, 1:], rtol=1e-4, atol=1e-4)
