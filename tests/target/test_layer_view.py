"""A draft gets its own layers of a target that captures more, as if it had asked alone."""

from concurrent.futures import Future

import pytest
import torch

from fledge.core.rows import TokenBatch
from fledge.target.base import LayerView, narrowed
from fledge.target.hf.model import HFEagle3TargetModel


def rows():
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
        alone = dict(target.with_layers(ids).answer(rows()).tensors())
        for answer in (
            subset.answer(rows()),
            subset.answer_async(rows()).result(),
            narrowed(target.answer(rows()), target, subset),
        ):
            assert dict(answer.tensors()).keys() == alone.keys()
            assert all(torch.equal(t, alone[name]) for name, t in answer.tensors())
            assert answer.aux_hidden_states.is_contiguous()
        subset.close()
        assert target.info() is not None  # other drafts still use it
        with pytest.raises(RuntimeError, match="is closed"):
            subset.answer(rows())
        with pytest.raises(ValueError, match=r"layers \[7\] are not shown"):
            LayerView(target, [0, 7])
        LayerView(target, ids, owner=True).close()
        with pytest.raises(RuntimeError, match="is closed"):
            target.info()


@pytest.mark.parametrize("error", [None, RuntimeError("this target is closed")])
def test_an_answer_that_was_canceled_may_still_arrive(tiny_target, caplog, error):
    with HFEagle3TargetModel.from_pretrained(
        tiny_target, aux_layer_ids=[0, 1, 2], dtype="float32", device="cpu"
    ) as target:
        inner, answer = Future(), target.answer(rows())
        target.answer_async = lambda _: inner
        outer = LayerView(target, [0, 2]).answer_async(rows())
        assert outer.cancel()
        if error is None:
            inner.set_result(answer)
        else:
            inner.set_exception(error)
    assert outer.cancelled()
    assert caplog.text == ""
