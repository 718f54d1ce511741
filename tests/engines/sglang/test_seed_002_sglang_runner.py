"""The documented behavior of the SGLang runner, in real SGLang. Each test quotes what it checks."""

import pytest
import torch

from fledge import HFEagle3TargetModel, RunnerEagle3TargetModel, SGLangTargetRunner
from target.contract import padded_rows
from target.tiny_models import tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def runner(directory):
    built = SGLangTargetRunner.build(
        model_path=directory, dtype=torch.float32, device="cpu", max_total_tokens=512, page_size=1
    )
    yield built
    built.close()


def test_one_extend_per_row_stacked(runner):
    """ "Returns (logits[batch, seq, vocab], aux[batch, seq, 3 * hidden]), both unshifted";
    "all-position full-vocab logits"; "The loaded nn.Module (exposes .config and .parameters())".
    """
    model = tiny_model("llama")
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)  # "Sequences must share a length"
    runner.set_aux_layers([1, 3, 4])  # "which 3 decoder layers to capture"
    logits, aux = runner.forward_eagle3(ids, mask)
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True)
    states = torch.cat([expected.hidden_states[i + 1] for i in (1, 3, 4)], dim=-1)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(aux, states, rtol=1e-3, atol=1e-3)
    assert runner.model.config.hidden_size * 3 == aux.shape[-1]
    assert [*runner.model.parameters()]
    # "Return the target input-embedding weight [vocab, hidden]."
    assert torch.equal(runner.input_embedding_weight(), model.get_input_embeddings().weight)


def test_the_contract_layer_applies_the_shift(runner):
    """ "the contract layer applies the EAGLE-3 shift" """
    target = RunnerEagle3TargetModel(runner)
    assert target.model is runner.model
    batch = target.generate_batch(*padded_rows())
    expected = HFEagle3TargetModel(tiny_model("llama")).generate_batch(*padded_rows())
    supervised = expected.loss_mask.bool()
    torch.testing.assert_close(
        batch.logits[supervised], expected.logits[supervised], rtol=1e-3, atol=1e-3
    )
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.loss_mask, expected.loss_mask)
