"""Any number of aux layers can be captured, cached, sent, and shared by several drafts."""

import re
from concurrent.futures import Future

import pytest
import torch
from contract import assert_same, packed_rows, padded_rows, some_documents
from hf_runner import HFTargetRunner
from tiny_models import tiny_model

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.base import LayerView
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.runner import RunnerEagle3TargetModel
from target.cache.caches import opened, token_row, write_cache
from target.remote.servers import running

LAYERS = [[4, 1], [0, 6, 2, 5, 3]]
DOCUMENTS = some_documents()
ROWS = TokenBatch(*packed_rows(DOCUMENTS, 14))
READ = ROWS.doc_remaining > 0  # what a trainer may read


def target(ids):
    model = tiny_model("llama")
    return HFEagle3TargetModel(model, ids, supervision="hidden", num_aux_layers=len(ids))


@pytest.mark.parametrize("ids", LAYERS, ids=len)
def test_aux_layers_are_captured_in_the_given_order(ids):
    model = tiny_model("llama")
    tokens, mask, loss = padded_rows()
    with torch.no_grad():
        states = model(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in ids], dim=-1)[mask.bool()]
    runner_target = RunnerEagle3TargetModel(
        HFTargetRunner(model), ids, supervision="hidden", num_aux_layers=len(ids)
    )
    for backend in (target(ids), runner_target):
        batch = backend.answer(TokenBatch(tokens, mask, loss))
        assert torch.equal(batch.aux_hidden_states[mask.bool()], expected)


@pytest.mark.parametrize("ids", LAYERS, ids=len)
def test_a_number_of_layers_other_than_three_must_be_given(ids):
    for make in (
        HFEagle3TargetModel,
        lambda *a: RunnerEagle3TargetModel(HFTargetRunner(a[0]), a[1]),
    ):
        with pytest.raises(ValueError, match="aux_layer_ids must be exactly three distinct layers"):
            make(tiny_model("llama"), ids)
    assert len(HFEagle3TargetModel(tiny_model("llama"), num_aux_layers=2).aux_layer_ids) == 2


@pytest.mark.parametrize("encoding", ["hidden", "hidden-fp8", "probs", "topk"])
@pytest.mark.parametrize("ids", LAYERS, ids=len)
def test_aux_layers_can_be_cached(ids, encoding, tmp_path):
    live = target(ids)
    rows = [token_row(tokens) for row in DOCUMENTS for tokens in row]
    top_k = 4 if encoding == "topk" else None
    write_cache(tmp_path / "cache", live, rows, encoding, top_k=top_k)
    with opened(tmp_path / "cache") as cached:
        batch, expected = cached.answer(ROWS), live.answer(ROWS)
    assert cached.aux_layer_ids == ids
    if encoding == "hidden":
        assert_same(batch, expected, READ, rtol=1e-4, atol=2e-5)  # batched with other documents
    real = ROWS.attention_mask.bool()
    aux, expected_aux = batch.aux_hidden_states[real], expected.aux_hidden_states[real]
    torch.testing.assert_close(
        aux, expected_aux, rtol=0.07 if encoding == "hidden-fp8" else 0, atol=0.02
    )


@pytest.mark.parametrize("ids", LAYERS, ids=len)
def test_aux_layers_can_be_sent_over_http(ids):
    live = target(ids)
    with (
        running(backend=target(ids)) as server,
        RemoteEagle3TargetModel(server.url, aux_layer_ids=ids) as remote,
    ):
        assert remote.aux_layer_ids == ids
        assert_same(remote.answer(ROWS), live.answer(ROWS), READ)
        refused = rf"capture aux layers {ids}, [1, 2, 3] are wanted"
        with pytest.raises(BadInput, match=re.escape(refused)):
            RemoteEagle3TargetModel(server.url, aux_layer_ids=[1, 2, 3])


def test_a_batch_holds_a_whole_number_of_layers():
    rows, hidden = TokenBatch(*padded_rows()), torch.zeros(3, 11, 4)
    for width in (4, 8, 20):
        aux = torch.zeros(3, 11, width)
        Eagle3TargetBatch.about(rows, aux_hidden_states=aux, last_hidden_states=hidden)
    for width in (0, 6, 9):
        aux = torch.zeros(3, 11, width)
        with pytest.raises(ValueError, match=r"aux_hidden_states is .* whole number of layers"):
            Eagle3TargetBatch.about(rows, aux_hidden_states=aux, last_hidden_states=hidden)


def plain_rows():
    ids = torch.arange(12).reshape(2, 6) + 5
    return TokenBatch(ids, torch.ones_like(ids), torch.ones_like(ids))


@pytest.mark.parametrize("supervision", ["hidden", "logits"])
@pytest.mark.parametrize("ids", [[3, 0], [1, 2], [0, 1, 2, 3]])
def test_a_subset_of_layers_is_answered_as_if_asked_for_alone(tiny_target, supervision, ids):
    options = {"supervision": supervision, "dtype": "float32", "device": "cpu"}
    with HFEagle3TargetModel.from_pretrained(
        tiny_target, aux_layer_ids=[0, 1, 2, 3], num_aux_layers=4, **options
    ) as target:
        subset = LayerView(target, ids)
        alone = target.with_layers(ids).answer(plain_rows())
        for answer in (subset.answer(plain_rows()), subset.answer_async(plain_rows()).result()):
            assert_same(answer, alone)
            assert answer.aux_hidden_states.is_contiguous()
        with pytest.raises(ValueError, match=r"layers \[7\] are not shown"):
            LayerView(target, [0, 7])
        subset.close()
        with pytest.raises(RuntimeError, match="is closed"):
            subset.answer(plain_rows())
        with pytest.raises(RuntimeError, match="is closed"):
            target.info()


@pytest.mark.parametrize("error", [None, RuntimeError("this target is closed")])
def test_an_answer_that_was_canceled_may_still_arrive(tiny_target, caplog, error):
    with HFEagle3TargetModel.from_pretrained(
        tiny_target, aux_layer_ids=[0, 1, 2], dtype="float32", device="cpu"
    ) as target:
        inner, answer = Future(), target.answer(plain_rows())
        target.answer_async = lambda _: inner
        outer = LayerView(target, [0, 2]).answer_async(plain_rows())
        assert outer.cancel()
        if error is None:
            inner.set_result(answer)
        else:
            inner.set_exception(error)
    assert outer.cancelled()
    assert caplog.text == ""
